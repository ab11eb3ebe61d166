/* The device scope's fast path: the ordinary case of dask_devctx/cuda/scope.py.
 *
 * A scope makes three calls to the driver: it asks for the current context, makes another context
 * current, and makes the first one current again. Each call takes tens of nanoseconds. Python's
 * bindings take fifteen times as long. This module calls the driver's functions by addresses that
 * the driver gives at run time. So the build needs no part of CUDA, and fits every version of it.
 *
 * Rare cases stay in Python: the binding of a scope to its context, a previous context that may
 * die, scopes that end out of order, and errors. C and Python keep the open scopes of a thread in
 * one place, the thread's Stack.
 *
 * The calls take less than a microsecond, so this module keeps the GIL: to release it and take it
 * again costs more than the calls. The GIL also keeps Python's signal handlers out. No
 * KeyboardInterrupt can arrive after a context is made current and before the Stack has its entry.
 *
 * In a Python without a GIL each thread has its own Stack, a lock guards the handles that last, and
 * a scope's Native is set once, in the scope's critical section.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stddef.h>
#include <stdint.h>

#include "native.h"
#include "search.h"
#include "stack.h"

#ifdef Py_GIL_DISABLED
#define BEGIN_ALONE(scope) Py_BEGIN_CRITICAL_SECTION(scope)
#define END_ALONE() Py_END_CRITICAL_SECTION()
#else
#define BEGIN_ALONE(scope) {
#define END_ALONE() }
#endif

/* The names of attributes and methods of Python objects. */
static PyObject *name_native, *name_calls, *name_context_id, *name_bind, *name_enter, *name_exit,
    *name_failed_restore, *name_undo, *name_current_error, *name_set_current_error;

typedef struct {
    PyObject_HEAD
    PyObject *backend;
    Native *native; /* of that backend; NULL until it is first needed */
    unsigned long long handle;
} ScopeBase;

static int
scope_traverse(ScopeBase *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->backend);
    return 0; /* a Native refers to no object */
}

static int
scope_clear(ScopeBase *self)
{
    Py_CLEAR(self->backend);
    Py_CLEAR(self->native);
    return 0;
}

static void
scope_dealloc(ScopeBase *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    scope_clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *
scope_get_backend(ScopeBase *self, void *Py_UNUSED(closure))
{
    if (self->backend == NULL) {
        PyErr_SetString(PyExc_AttributeError, "_backend");
        return NULL;
    }
    return Py_NewRef(self->backend);
}

static int
scope_set_backend(ScopeBase *self, PyObject *value, void *Py_UNUSED(closure))
{
    PyObject *old = self->backend;
    self->backend = Py_XNewRef(value);
    Py_XDECREF(old);
    Py_CLEAR(self->native);
    return 0;
}

/* Bind the scope and find the addresses. Return 1, 0 if there are no addresses, -1 on error. */
static int
scope_prepare(ScopeBase *self)
{
    if (!self->handle) {
        PyObject *bound = PyObject_CallMethodObjArgs((PyObject *)self, name_bind, NULL);
        if (bound == NULL)
            return -1;
        Py_DECREF(bound);
    }
    if (self->native == NULL) {
        PyObject *backend = scope_get_backend(self, NULL);
        if (backend == NULL)
            return -1;
        PyObject *native = PyObject_GetAttr(backend, name_native);
        Py_DECREF(backend);
        if (native == NULL)
            return -1;
        if (Py_IS_TYPE(native, native_type)) {
            BEGIN_ALONE(self);
            /* Python code ran, or another thread did: keep a Native that it has set. */
            if (self->native == NULL)
                self->native = (Native *)Py_NewRef(native);
            END_ALONE();
        }
        Py_DECREF(native);
    }
    return self->handle && self->native != NULL;
}

/* Call self._backend.calls.<method>(number); steal the reference to the number. */
static PyObject *
scope_ask(ScopeBase *self, PyObject *method, PyObject *number)
{
    if (number == NULL)
        return NULL;
    PyObject *calls = PyObject_GetAttr(self->backend, name_calls);
    PyObject *answer = NULL;
    if (calls != NULL)
        answer = PyObject_CallMethodObjArgs(calls, method, number, NULL);
    Py_DECREF(number);
    Py_XDECREF(calls);
    return answer;
}

/* Return the exception for a status, which `method` of the backend's calls makes. */
static PyObject *
scope_error(ScopeBase *self, PyObject *method, int status)
{
    return scope_ask(self, method, PyLong_FromLong(status));
}

/* Raise that exception; return NULL. */
static PyObject *
scope_raise(ScopeBase *self, PyObject *method, int status)
{
    PyObject *error = scope_error(self, method, status);
    if (error != NULL) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        Py_DECREF(error);
    }
    return NULL;
}

/* Call self._failed_restore(error, exc), which raises the error or adds it to `exc` as a note. */
static PyObject *
scope_failed_restore(ScopeBase *self, PyObject *method, int status, PyObject *exc)
{
    PyObject *error = scope_error(self, method, status);
    if (error == NULL)
        return NULL;
    PyObject *result =
        PyObject_CallMethodObjArgs((PyObject *)self, name_failed_restore, error, exc, NULL);
    Py_DECREF(error);
    return result;
}

/* Call self._undo(previous, identity), then raise the error. Steal the reference to identity. */
static PyObject *
scope_refused(ScopeBase *self, int status, uintptr_t previous, PyObject *identity)
{
    PyObject *error = scope_error(self, name_set_current_error, status);
    PyObject *handle = PyLong_FromVoidPtr((void *)previous);
    PyObject *undone = NULL;
    if (identity == NULL)
        identity = PyLong_FromLong(0);
    if (error != NULL && handle != NULL && identity != NULL)
        undone = PyObject_CallMethodObjArgs((PyObject *)self, name_undo, handle, identity, NULL);
    if (undone != NULL)
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(undone);
    Py_XDECREF(handle);
    Py_XDECREF(identity);
    Py_XDECREF(error);
    return NULL;
}

static PyObject *
scope_enter(ScopeBase *self, PyObject *Py_UNUSED(ignored))
{
    if (!self->handle || self->native == NULL) {
        int ready = scope_prepare(self);
        if (ready < 0)
            return NULL;
        if (!ready)
            return PyObject_CallMethodObjArgs((PyObject *)self, name_enter, NULL);
    }
    Stack *stack = thread_stack();
    if (stack == NULL || stack_reserve(stack) < 0)
        return NULL;

    Native *native = self->native; /* valid until Python code runs, which may free it */
    get_current_function get_current = native->get_current;
    set_current_function set_current = native->set_current;
    void *current = NULL;
    int status = get_current(&current);
    if (status)
        return scope_raise(self, name_current_error, status);
    uintptr_t previous = (uintptr_t)current;
    PyObject *identity = NULL;
    if (previous && !native_has(native, previous)) {
        identity = scope_ask(self, name_context_id, PyLong_FromVoidPtr((void *)previous));
        /* Python code ran, and may have added entries to the stack. */
        if (identity == NULL || stack_reserve(stack) < 0) {
            Py_XDECREF(identity);
            return NULL;
        }
    }
    status = set_current((void *)(uintptr_t)self->handle);
    if (status)
        return scope_refused(self, status, previous, identity);
    stack->entries[stack->count++] = (Entry){Py_NewRef((PyObject *)self), previous, identity};
    return Py_NewRef((PyObject *)self);
}

/* Make the previous context current again; return the status of the call that failed, or 0.
 *
 * To set no context takes one context off the driver's stack, and the body may have pushed several:
 * so that is repeated until none is left. */
static int
restore(Native *native, uintptr_t previous, PyObject **failed)
{
    get_current_function get_current = native->get_current;
    set_current_function set_current = native->set_current;
    *failed = name_set_current_error;
    int status = set_current((void *)previous);
    while (!status && !previous) {
        void *current = NULL;
        *failed = name_current_error;
        status = get_current(&current);
        if (status || current == NULL)
            break;
        *failed = name_set_current_error;
        status = set_current(NULL);
    }
    return status;
}

static PyObject *
scope_exit(ScopeBase *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3) {
        PyErr_Format(PyExc_TypeError, "__exit__ takes 3 arguments, got %zd", nargs);
        return NULL;
    }
    Stack *stack = thread_stack();
    if (stack == NULL)
        return NULL;
    Py_ssize_t top = stack->count - 1;
    Native *native = self->native;
    if (native == NULL || top < 0 || stack->entries[top].scope != (PyObject *)self
        || stack->entries[top].identity != NULL)
        return PyObject_CallMethodObjArgs((PyObject *)self, name_exit, args[0], args[1], args[2],
                                          NULL);
    PyObject *failed;
    int status = restore(native, stack->entries[top].previous, &failed);
    Entry entry = stack->entries[--stack->count]; /* only after the restore */
    PyObject *result =
        status ? scope_failed_restore(self, failed, status, args[1]) : Py_NewRef(Py_False);
    entry_clear(entry); /* its identity is NULL, and the caller keeps self alive */
    return result;
}

static PyMethodDef scope_methods[] = {
    {"__enter__", (PyCFunction)scope_enter, METH_NOARGS,
     "Make the context current and remember the previous one."},
    {"__exit__", (PyCFunction)(void (*)(void))scope_exit, METH_FASTCALL,
     "Make the previous context current again."},
    {NULL},
};

static PyMemberDef scope_members[] = {
    {"_handle", T_ULONGLONG, offsetof(ScopeBase, handle), 0, "the context's handle; 0 if not bound"},
    {NULL},
};

static PyGetSetDef scope_getset[] = {
    {"_backend", (getter)scope_get_backend, (setter)scope_set_backend, "the context's backend"},
    {NULL},
};

static PyType_Slot scope_slots[] = {
    {Py_tp_doc, "The base of Scope: enters and leaves by its backend's addresses, if any."},
    {Py_tp_dealloc, scope_dealloc},
    {Py_tp_traverse, scope_traverse},
    {Py_tp_clear, scope_clear},
    {Py_tp_methods, scope_methods},
    {Py_tp_members, scope_members},
    {Py_tp_getset, scope_getset},
    {0, NULL},
};

static PyType_Spec scope_spec = {
    .name = "dask_devctx.driver._scope.ScopeBase",
    .basicsize = sizeof(ScopeBase),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC
             | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = scope_slots,
};

/* -- the module */

static PyObject *
module_stack(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    return Py_XNewRef((PyObject *)thread_stack());
}

/* -- Any short function of the driver, by its address
 *
 * A call that takes a few microseconds at most keeps the GIL. If it released the GIL, another thread
 * would often have it at the end of the call, and could keep it for milliseconds.
 */

#define INVOKE_MOST 4

static int
invoke_arguments(PyObject *const *args, Py_ssize_t nargs, Py_ssize_t before, uintptr_t *address,
                 uintptr_t *numbers)
{
    if (nargs < 1 + before || nargs > 1 + INVOKE_MOST) {
        PyErr_SetString(PyExc_TypeError, "an address and at most four numbers are needed");
        return -1;
    }
    if (as_handle(args[0], address) < 0)
        return -1;
    if (!*address) {
        PyErr_SetString(PyExc_ValueError, "a function cannot be at address 0");
        return -1;
    }
    for (Py_ssize_t i = 1; i < nargs; i++)
        if (as_handle(args[i], &numbers[i - 1]) < 0)
            return -1;
    return 0;
}

typedef int (*any_function)(uintptr_t, uintptr_t, uintptr_t, uintptr_t);

static PyObject *
module_invoke(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    uintptr_t address, n[INVOKE_MOST] = {0};
    if (invoke_arguments(args, nargs, 0, &address, n) < 0)
        return NULL;
    return PyLong_FromLong(((any_function)address)(n[0], n[1], n[2], n[3]));
}

static PyObject *
module_invoke_out(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    uintptr_t address, n[INVOKE_MOST] = {0};
    if (invoke_arguments(args, nargs, 1, &address, n) < 0)
        return NULL;
    uintptr_t value = n[0];
    int status = ((any_function)address)((uintptr_t)&value, n[1], n[2], n[3]);
    PyObject *number = PyLong_FromVoidPtr((void *)value);
    return number == NULL ? NULL : Py_BuildValue("iN", status, number);
}

/* -- Several of them in one call, so that a check of a device costs one call from Python
 *
 * The thread's capture mode is relaxed meanwhile: these calls spoil no other thread's graph. Calls
 * that may wait for the device release the GIL.
 */

#define RELAXED_CAPTURE 2
#define RELAXED_MOST 4 /* functions, each with two numbers */

typedef int (*exchange_mode_function)(int *mode);

static PyObject *
invoke_in_relaxed_mode(PyObject *const *args, Py_ssize_t nargs, int may_wait)
{
    uintptr_t n[1 + 3 * RELAXED_MOST];
    if (nargs < 1 || nargs > 1 + 3 * RELAXED_MOST || nargs % 3 != 1) {
        PyErr_SetString(PyExc_TypeError, "an address, and at most four with two numbers each");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < nargs; i++) {
        if (as_handle(args[i], &n[i]) < 0)
            return NULL;
        if (!n[i] && (i == 0 || i % 3 == 1)) {
            PyErr_SetString(PyExc_ValueError, "a function cannot be at address 0");
            return NULL;
        }
    }
    exchange_mode_function exchange = (exchange_mode_function)n[0];
    int mode = RELAXED_CAPTURE;
    uintptr_t failed = n[0];
    PyThreadState *state = may_wait ? PyEval_SaveThread() : NULL;
    int status = exchange(&mode);
    if (!status) {
        for (Py_ssize_t i = 1; i < nargs && !status; i += 3) {
            failed = n[i];
            status = ((any_function)n[i])(n[i + 1], n[i + 2], 0, 0);
        }
        int back = exchange(&mode);
        if (!status && back) {
            failed = n[0];
            status = back;
        }
    }
    if (state != NULL)
        PyEval_RestoreThread(state);
    if (!status)
        Py_RETURN_NONE;
    PyObject *address = PyLong_FromVoidPtr((void *)failed);
    return address == NULL ? NULL : Py_BuildValue("Ni", address, status);
}

static PyObject *
module_invoke_relaxed(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    return invoke_in_relaxed_mode(args, nargs, 0);
}

static PyObject *
module_wait_relaxed(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    return invoke_in_relaxed_mode(args, nargs, 1);
}

static PyMethodDef module_methods[] = {
    {"invoke", (PyCFunction)(void (*)(void))module_invoke, METH_FASTCALL,
     "invoke(address, *numbers)\n--\n\nReturn the status of f(*numbers)."},
    {"invoke_out", (PyCFunction)(void (*)(void))module_invoke_out, METH_FASTCALL,
     "invoke_out(address, value, *numbers)\n--\n\n"
     "Return the status of f(&value, *numbers), and the value afterwards."},
    {"invoke_relaxed", (PyCFunction)(void (*)(void))module_invoke_relaxed, METH_FASTCALL,
     "invoke_relaxed(exchange, *calls)\n--\n\n"
     "Make the calls, each an address and two numbers, in relaxed capture mode, up to the first\n"
     "that fails. Return its address and its status; None if all succeed."},
    {"wait_relaxed", (PyCFunction)(void (*)(void))module_wait_relaxed, METH_FASTCALL,
     "wait_relaxed(exchange, *calls)\n--\n\nDo as invoke_relaxed, without the GIL."},
    {"few", (PyCFunction)(void (*)(void))module_few, METH_FASTCALL,
     "few(root, known, leaf, at_most)\n--\n\n"
     "Return the leaves in a value, or None, as walk.few does; known has what walk.find returns."},
    {"stack", module_stack, METH_NOARGS, "stack()\n--\n\nReturn the stack of the calling thread."},
    {NULL},
};

static PyTypeObject *
add_type(PyObject *module, const char *name, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL)
        return NULL;
    int failed = PyModule_AddObjectRef(module, name, type);
    Py_DECREF(type);
    return failed ? NULL : (PyTypeObject *)type;
}

/* The static variables serve one module. A second interpreter, or a second import, gets an
 * ImportError, and uses the Python code as if this module was not built. */
static int
module_exec(PyObject *module)
{
    static struct {
        PyObject **where;
        const char *text;
    } names[] = {
        {&stack_key, "dask_devctx.driver._scope.stack"},
        {&name_native, "native"},
        {&name_calls, "calls"},
        {&name_context_id, "context_id"},
        {&name_bind, "_bind"},
        {&name_enter, "_enter"},
        {&name_exit, "_exit"},
        {&name_failed_restore, "_failed_restore"},
        {&name_undo, "_undo"},
        {&name_current_error, "current_error"},
        {&name_set_current_error, "set_current_error"},
    };
    if (stack_key != NULL) {
        PyErr_SetString(PyExc_ImportError,
                        "dask_devctx.driver._scope can be loaded once in a process");
        return -1;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if ((*names[i].where = PyUnicode_InternFromString(names[i].text)) == NULL)
            return -1;
    native_type = add_type(module, "Native", &native_spec);
    stack_type = add_type(module, "Stack", &stack_spec);
    if (native_type == NULL || stack_type == NULL)
        return -1;
    return add_type(module, "ScopeBase", &scope_spec) == NULL ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "dask_devctx.driver._scope",
    .m_doc = "The device scope's fast path.",
    .m_size = 0,
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__scope(void)
{
    return PyModuleDef_Init(&module_definition);
}
