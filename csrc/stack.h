/* Stack: the scopes that are open on one thread, outermost first. */

#ifndef DASK_DEVCTX_STACK_H
#define DASK_DEVCTX_STACK_H

#include <Python.h>

#include <stdint.h>
#include <string.h>

#include "native.h" /* as_handle */

static PyTypeObject *stack_type; /* borrowed, like all types here */
static PyObject *stack_key;      /* the key of a thread's stack in the thread's dictionary */

typedef struct {
    PyObject *scope;
    uintptr_t previous;
    PyObject *identity; /* NULL if the previous context lasts; 0 in Python */
} Entry;

typedef struct {
    PyObject_HEAD
    Entry *entries;
    Py_ssize_t count, room;
} Stack;

static void
entry_clear(Entry entry)
{
    Py_XDECREF(entry.identity);
    Py_DECREF(entry.scope);
}

static int
stack_reserve(Stack *self)
{
    if (self->count < self->room)
        return 0;
    Py_ssize_t room = self->room ? 2 * self->room : 16;
    Entry *wider = PyMem_Realloc(self->entries, (size_t)room * sizeof *wider);
    if (wider == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->entries = wider;
    self->room = room;
    return 0;
}

static void
stack_dealloc(Stack *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    while (self->count)
        entry_clear(self->entries[--self->count]);
    PyMem_Free(self->entries);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static Py_ssize_t
stack_length(Stack *self)
{
    return self->count;
}

static int
stack_check(Stack *self, Py_ssize_t place)
{
    if (place >= 0 && place < self->count)
        return 0;
    PyErr_SetString(PyExc_IndexError, "no such scope on the stack");
    return -1;
}

static PyObject *
stack_item(Stack *self, Py_ssize_t place)
{
    if (stack_check(self, place) < 0)
        return NULL;
    Entry *entry = &self->entries[place];
    PyObject *previous = PyLong_FromVoidPtr((void *)entry->previous);
    PyObject *identity =
        entry->identity ? Py_NewRef(entry->identity) : PyLong_FromLong(0);
    PyObject *item = NULL;
    if (previous != NULL && identity != NULL)
        item = PyTuple_Pack(3, entry->scope, previous, identity);
    Py_XDECREF(previous);
    Py_XDECREF(identity);
    return item;
}

static int
entry_from(PyObject *item, Entry *entry)
{
    if (!PyTuple_Check(item) || PyTuple_Size(item) != 3) {
        PyErr_SetString(PyExc_TypeError, "an entry is (scope, previous, identity)");
        return -1;
    }
    PyObject *identity = PyTuple_GetItem(item, 2);
    if (as_handle(PyTuple_GetItem(item, 1), &entry->previous) < 0)
        return -1;
    int matters = identity == Py_None ? 1 : PyObject_IsTrue(identity);
    if (matters < 0)
        return -1;
    entry->identity = matters ? Py_NewRef(identity) : NULL;
    entry->scope = Py_NewRef(PyTuple_GetItem(item, 0));
    return 0;
}

static int
stack_assign(Stack *self, Py_ssize_t place, PyObject *item)
{
    if (stack_check(self, place) < 0)
        return -1;
    Entry old = self->entries[place];
    if (item != NULL) {
        Entry entry;
        if (entry_from(item, &entry) < 0)
            return -1;
        self->entries[place] = entry;
    }
    else {
        self->count--;
        memmove(&self->entries[place], &self->entries[place + 1],
                (size_t)(self->count - place) * sizeof old);
    }
    entry_clear(old);
    return 0;
}

static PyObject *
stack_append(Stack *self, PyObject *item)
{
    if (stack_reserve(self) < 0 || entry_from(item, &self->entries[self->count]) < 0)
        return NULL;
    self->count++;
    Py_RETURN_NONE;
}

static PyObject *
stack_pop(Stack *self, PyObject *Py_UNUSED(ignored))
{
    PyObject *item = stack_item(self, self->count - 1);
    if (item != NULL)
        entry_clear(self->entries[--self->count]);
    return item;
}

static PyMethodDef stack_methods[] = {
    {"append", (PyCFunction)stack_append, METH_O, "Put an entry on top."},
    {"pop", (PyCFunction)stack_pop, METH_NOARGS, "Take the top entry and return it."},
    {NULL},
};

static PyType_Slot stack_slots[] = {
    {Py_tp_doc, "The scopes that are open on one thread: a list of (scope, previous, identity)."},
    {Py_tp_dealloc, stack_dealloc},
    {Py_tp_iter, PySeqIter_New},
    {Py_tp_methods, stack_methods},
    {Py_sq_length, stack_length},
    {Py_sq_item, stack_item},
    {Py_sq_ass_item, stack_assign},
    {0, NULL},
};

static PyType_Spec stack_spec = {
    .name = "dask_devctx.driver._scope.Stack",
    .basicsize = sizeof(Stack),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = stack_slots,
};

/* The calling thread's stack, borrowed: the thread's dictionary owns it and dies with the thread. */
static Stack *
thread_stack(void)
{
    PyObject *dict = PyThreadState_GetDict();
    if (dict == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "this thread has no room for a stack of scopes");
        return NULL;
    }
    PyObject *found = PyDict_GetItemWithError(dict, stack_key);
    if (found != NULL || PyErr_Occurred())
        return (Stack *)found;
    Stack *made = PyObject_New(Stack, stack_type);
    if (made == NULL)
        return NULL;
    made->entries = NULL;
    made->count = made->room = 0;
    int failed = PyDict_SetItem(dict, stack_key, (PyObject *)made);
    Py_DECREF(made);
    return failed ? NULL : made;
}

#endif
