/* py_image.c: image_resize and image_patches of llmpy._core, on any uint8 buffer of shape [height, width, 3]. */
#include "py.h"

#include "../base/image.h"

#include <string.h>

/* A view of an image. The buffer is held until PyBuffer_Release. 0, or -1 with an exception set. */
static int take_image(PyObject *object, Py_buffer *buffer, struct image *image)
{
    if (PyObject_GetBuffer(object, buffer, PyBUF_STRIDES | PyBUF_FORMAT) < 0)
        return -1;
    const Py_ssize_t *shape = buffer->shape, *strides = buffer->strides;
    bool is_pixels = buffer->ndim == 3 && strcmp(buffer->format, "B") == 0 && shape[2] == IMAGE_CHANNELS &&
                     strides[2] == 1 && strides[1] == IMAGE_CHANNELS;
    if (is_pixels && shape[0] >= 1 && shape[1] >= 1 && shape[0] <= IMAGE_MAX_SIDE && shape[1] <= IMAGE_MAX_SIDE) {
        *image = (struct image){buffer->buf, (uint32_t)shape[0], (uint32_t)shape[1], strides[0]};
        return 0;
    }
    PyBuffer_Release(buffer);
    PyErr_Format(PyExc_ValueError, "image: wanted uint8 [height, width, 3] of whole pixels and sides of 1 to %u",
                 IMAGE_MAX_SIDE);
    return -1;
}

/* image_resize(image, height, width, filter) -> bytes */
PyObject *py_image_resize(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *object;
    long height, width, filter;
    if (!PyArg_ParseTuple(args, "Olll:image_resize", &object, &height, &width, &filter))
        return NULL;
    if (!image_has_filter(filter) || height < 1 || width < 1 || height > (long)IMAGE_MAX_SIDE || width > (long)IMAGE_MAX_SIDE)
        return PyErr_Format(PyExc_ValueError, "image_resize: wanted sides of 1 to %u, filter 1 to 3, have %ld x %ld, %ld",
                            IMAGE_MAX_SIDE, height, width, filter);
    Py_buffer buffer;
    struct image image;
    if (take_image(object, &buffer, &image) < 0)
        return NULL;
    struct err err;
    enum rc rc = RC_OK;
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)height * width * IMAGE_CHANNELS);
    if (result) {
        uint8_t *to = (uint8_t *)PyBytes_AsString(result);
        Py_BEGIN_ALLOW_THREADS
        rc = image_resize(&image, (enum image_filter)filter, (uint32_t)height, (uint32_t)width, to, &err);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&buffer);
    if (rc == RC_OK)
        return result;
    Py_DECREF(result);
    return py_raise(&err);
}

/* Raises unless patches of the image fill the bytes of `to`. */
static int check_patches(const struct image *image, long patch, long merge, const Py_buffer *to)
{
    bool divides = patch >= 1 && merge >= 1 && patch <= (long)IMAGE_MAX_SIDE && merge <= (long)IMAGE_MAX_SIDE &&
                   image->height % (patch * merge) == 0 && image->width % (patch * merge) == 0;
    Py_ssize_t wanted = (Py_ssize_t)image->height * image->width * IMAGE_CHANNELS;
    if (divides && to->len == wanted)
        return 0;
    PyErr_Format(PyExc_ValueError, "image_patches: wanted sides that %ld x %ld divides and %zd bytes, have %u x %u and %zd",
                 patch, merge, wanted, image->height, image->width, to->len);
    return -1;
}

/* image_patches(image, patch, merge, to) -> None */
PyObject *py_image_patches(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *object, *target;
    long patch, merge;
    if (!PyArg_ParseTuple(args, "OllO:image_patches", &object, &patch, &merge, &target))
        return NULL;
    Py_buffer from, to;
    struct image image;
    if (take_image(object, &from, &image) < 0)
        return NULL;
    if (PyObject_GetBuffer(target, &to, PyBUF_CONTIG) < 0) {
        PyBuffer_Release(&from);
        return NULL;
    }
    int failed = check_patches(&image, patch, merge, &to);
    if (!failed) {
        Py_BEGIN_ALLOW_THREADS
        image_patches(&image, (uint32_t)patch, (uint32_t)merge, to.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    return failed ? NULL : Py_NewRef(Py_None);
}
