/* The search through a value of a few objects: it finds what the one in transfer/walk.py finds. */

#ifndef DASK_DEVCTX_SEARCH_H
#define DASK_DEVCTX_SEARCH_H

#include <Python.h>

/* What is known of a value's type: None, the leaf, or the function that returns its parts. */
static PyObject *
known_of(PyObject *known, PyObject *value)
{
    return PyObject_GetItem(known, (PyObject *)Py_TYPE(value));
}

/* Append a part if it may hold arrays, and is not there. Return -1 with an exception set. */
static int
add_part(PyObject *todo, PyObject *known, PyObject *part)
{
    PyObject *found = known_of(known, part);
    if (found == NULL)
        return -1;
    int plain = found == Py_None;
    Py_DECREF(found);
    if (plain)
        return 0;
    for (Py_ssize_t i = PyList_Size(todo); i-- > 0;) /* they are few */
        if (PyList_GetItem(todo, i) == part)
            return 0;
    return PyList_Append(todo, part);
}

/* Return 1 after all of a value's parts were added, 0 if there are too many, -1 on an exception. */
static int
add_parts(PyObject *todo, PyObject *known, PyObject *value, PyObject *take, Py_ssize_t at_most)
{
    PyObject *parts = PyList_CheckExact(value) || PyTuple_CheckExact(value)
                          ? Py_NewRef(value) /* they are their own parts */
                          : PyObject_CallFunctionObjArgs(take, value, NULL);
    Py_ssize_t count = parts == NULL ? -1 : PySequence_Size(parts);
    int done = count < 0 ? -1 : PyList_Size(todo) + count <= at_most;
    for (Py_ssize_t i = 0; done > 0 && i < count; i++) {
        PyObject *part = PySequence_GetItem(parts, i);
        if (part == NULL || add_part(todo, known, part) < 0)
            done = -1;
        Py_XDECREF(part);
    }
    Py_XDECREF(parts);
    return done;
}

static PyObject *
module_few(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 4) {
        PyErr_Format(PyExc_TypeError, "few takes 4 arguments, got %zd", nargs);
        return NULL;
    }
    PyObject *known = args[1], *leaf = args[2];
    Py_ssize_t at_most = PyLong_AsSsize_t(args[3]);
    PyObject *todo = PyList_New(0), *leaves = PyList_New(0);
    int done = todo == NULL || leaves == NULL || PyErr_Occurred() ? -1 : 1;
    if (done > 0 && PyList_Append(todo, args[0]) < 0)
        done = -1;
    for (Py_ssize_t i = 0; done > 0 && i < PyList_Size(todo); i++) {
        PyObject *value = PyList_GetItem(todo, i); /* borrowed: todo only grows */
        PyObject *found = known_of(known, value);
        if (found == NULL)
            done = -1;
        else if (found == leaf)
            done = PyList_Append(leaves, value) < 0 ? -1 : 1;
        else if (found != Py_None)
            done = add_parts(todo, known, value, found, at_most);
        Py_XDECREF(found);
    }
    Py_XDECREF(todo);
    if (done > 0)
        return leaves;
    Py_XDECREF(leaves);
    if (done < 0 && !PyErr_ExceptionMatches(PyExc_Exception))
        return NULL;
    PyErr_Clear(); /* of a part of it; the walk meets it again, and knows what to do */
    Py_RETURN_NONE;
}

#endif
