/* Native: two addresses of one driver, and the handles of contexts that last. */

#ifndef DASK_DEVCTX_NATIVE_H
#define DASK_DEVCTX_NATIVE_H

#include <Python.h>

#include <stdint.h>

/* In a build with a GIL, the GIL is the lock: no code below runs Python while it holds the lock. */
#ifdef Py_GIL_DISABLED
#define WITH_LOCK(owner) PyMutex_Lock(&(owner)->mutex)
#define END_LOCK(owner) PyMutex_Unlock(&(owner)->mutex)
#define MUTEX PyMutex mutex;
#else
#define WITH_LOCK(owner) (void)(owner)
#define END_LOCK(owner) (void)(owner)
#define MUTEX
#endif

typedef int (*get_current_function)(void **);
typedef int (*set_current_function)(void *);

static PyTypeObject *native_type; /* borrowed: the module owns it, and modules are never unloaded */

typedef struct {
    PyObject_HEAD
    get_current_function get_current;
    set_current_function set_current;
    uintptr_t *lasting; /* few: 0, and one for each GPU in use */
    Py_ssize_t count, room;
    MUTEX /* guards the three fields above */
} Native;

/* Return the place of a handle, or -1. The caller holds the lock. */
static Py_ssize_t
native_place(Native *self, uintptr_t handle)
{
    for (Py_ssize_t i = 0; i < self->count; i++)
        if (self->lasting[i] == handle)
            return i;
    return -1;
}

static int
native_has(Native *self, uintptr_t handle)
{
    WITH_LOCK(self);
    int found = native_place(self, handle) >= 0;
    END_LOCK(self);
    return found;
}

/* Return -1 if there is no memory. The caller holds the lock. */
static int
native_append(Native *self, uintptr_t handle)
{
    if (native_place(self, handle) >= 0)
        return 0;
    if (self->count == self->room) {
        Py_ssize_t room = self->room ? 2 * self->room : 16;
        uintptr_t *wider = PyMem_Realloc(self->lasting, (size_t)room * sizeof *wider);
        if (wider == NULL)
            return -1;
        self->lasting = wider;
        self->room = room;
    }
    self->lasting[self->count++] = handle;
    return 0;
}

static int
native_insert(Native *self, uintptr_t handle)
{
    WITH_LOCK(self);
    int failed = native_append(self, handle);
    END_LOCK(self);
    if (failed)
        PyErr_NoMemory();
    return failed;
}

static int
as_handle(PyObject *number, uintptr_t *handle)
{
    *handle = (uintptr_t)PyLong_AsVoidPtr(number);
    return *handle == 0 && PyErr_Occurred() ? -1 : 0;
}

static PyObject *
native_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *get_current, *set_current;
    uintptr_t get_address, set_address;
    if (!PyArg_ParseTuple(args, "OO:Native", &get_current, &set_current))
        return NULL;
    if (as_handle(get_current, &get_address) < 0 || as_handle(set_current, &set_address) < 0)
        return NULL;
    if (!get_address || !set_address) {
        PyErr_SetString(PyExc_ValueError, "a function cannot be at address 0");
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Native *self = (Native *)alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->get_current = (get_current_function)get_address;
    self->set_current = (set_current_function)set_address;
    if (native_insert(self, 0) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void
native_dealloc(Native *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyMem_Free(self->lasting);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *
native_add(Native *self, PyObject *number)
{
    uintptr_t handle;
    if (as_handle(number, &handle) < 0 || native_insert(self, handle) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static int
native_contains(Native *self, PyObject *number)
{
    uintptr_t handle;
    if (as_handle(number, &handle) < 0)
        return -1;
    return native_has(self, handle);
}

static PyMethodDef native_methods[] = {
    {"add", (PyCFunction)native_add, METH_O, "Add a handle to those that last."},
    {NULL},
};

static PyType_Slot native_slots[] = {
    {Py_tp_doc, "Native(get_current, set_current)\n--\n\n"
                "The addresses of a driver's two functions, and the set of handles that last."},
    {Py_tp_new, native_new},
    {Py_tp_dealloc, native_dealloc},
    {Py_tp_methods, native_methods},
    {Py_sq_contains, native_contains},
    {0, NULL},
};

static PyType_Spec native_spec = {
    .name = "dask_devctx.driver._scope.Native",
    .basicsize = sizeof(Native),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = native_slots,
};

#endif
