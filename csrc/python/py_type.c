#include "py.h"

int py_add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    int result = type ? PyModule_AddType(module, (PyTypeObject *)type) : -1;
    Py_XDECREF(type);
    return result;
}

void *py_allocate(PyTypeObject *type)
{
    return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

void py_deallocate(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}
