// sketchssm.cuda._direct: a decode step from tensors to launches without Python in between.
//
// A `Step` takes a call whose arguments the kernels can use as they are, and launches the kernels. It declines every
// other call, before anything is written; the caller then takes the way through Python, which converts, checks and
// explains. Tensors are read through the C interface of DLPack, kernels are launched through the driver's functions,
// whose addresses come from Python: neither PyTorch nor CUDA is needed to build this file.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

#include "_direct_interfaces.h"

namespace {

// Values of a call that a kernel's parameter may have.
enum Value { ADDRESS = 0, STRIDE = 6, SLOTS = 12, SLOT_FLAGS, SCAN, ROWS, WORKSPACE, ZERO, ONE, VALUES };
const char* const NAMES[VALUES] = {"q",        "k",        "v",        "g",        "beta",        "out",
                                   "q_stride", "k_stride", "v_stride", "g_stride", "beta_stride", "out_stride",
                                   "slot_numbers", "slot_flags", "scan_to", "batch", "schedule", "zero", "one"};
constexpr int ARRAYS = 6, OUT = 5, BETA = 4, V = 2;  // q, k, v, g, beta, out
constexpr int ALIGNMENT = 16;
enum { WIDE = 1, COUNTED = 2 };  // flags of slots, as in constants.py

struct Array {  // what an argument must look like: rows of `shape`
    std::vector<std::int64_t> shape;
    int code, bits;
    std::int64_t elements;  // of a row
    bool absent;            // the layer has no such argument
};

struct Parameter {
    char* place;
    int size, value;
};

struct Kernel {
    Config* config;
    void* function;
    void** arguments;
    std::vector<Parameter> parameters;
};

struct Grid {
    unsigned blocks, threads;
};

struct Step {
    PyObject_HEAD
    const Exchange* exchange;
    PyObject *tensor_type, *grad_enabled, *requires_grad, *failed;  // `failed` raises the error of a launch
    Driver driver;
    std::int32_t device_type, device;
    void* context;
    std::int64_t all_slots, capacity;  // address of the numbers 0, 1, ... and their count
    Array arrays[ARRAYS];
    std::vector<Kernel> kernels;
    std::vector<std::vector<Grid>> grids;                          // by rows; one for each kernel
    std::unordered_map<void*, std::int64_t> workspaces;            // by stream
};

struct Release {
    void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;  // a reference that is given up with this object

// Reads a tensor's fields; false for anything but a plain tensor on the head's device.
bool look(const Step& step, PyObject* object, Tensor* tensor) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != step.tensor_type) return false;
    if (step.exchange->tensor_of_object(object, tensor)) {
        PyErr_Clear();  // such as a sparse tensor
        return false;
    }
    return tensor->device_type == step.device_type && tensor->device == step.device && tensor->lanes == 1;
}

std::int64_t address_of(const Tensor& tensor) {
    return reinterpret_cast<std::int64_t>(tensor.data) + static_cast<std::int64_t>(tensor.byte_offset);
}

// Takes one array as the kernels need it: its address, and the bytes between its rows.
bool take(const Array& want, const Tensor& tensor, std::int64_t rows, bool may_be_strided,
          std::int64_t* address, std::int64_t* stride) {
    const int axes = static_cast<int>(want.shape.size()) + 1;
    if (tensor.axes != axes || tensor.code != want.code || tensor.bits != want.bits || tensor.shape[0] != rows)
        return false;
    std::int64_t contiguous = 1;
    for (int i = axes - 1; i > 0; i--) {
        if (tensor.shape[i] != want.shape[i - 1]) return false;
        if (tensor.strides && tensor.shape[i] != 1 && tensor.strides[i] != contiguous) return false;
        contiguous *= tensor.shape[i];
    }
    const int item = want.bits / 8, unit = want.shape.size() > 1 ? ALIGNMENT : item;  // numbers per head: one by one
    contiguous *= item;
    *stride = rows > 1 && tensor.strides ? tensor.strides[0] * item : contiguous;
    const bool usable = may_be_strided && *stride >= 0 && *stride <= INT32_MAX && *stride % unit == 0;
    if (*stride != contiguous && !usable) return false;
    *address = address_of(tensor);
    return *address % unit == 0;
}

// Makes the array of outputs; null without an error set if that is left to Python.
Owned make_out(const Step& step, std::int64_t rows, Tensor* tensor) {
    const Array& want = step.arrays[OUT];
    std::vector<std::int64_t> shape{rows};
    shape.insert(shape.end(), want.shape.begin(), want.shape.end());
    Tensor like{};
    like.device_type = step.device_type, like.device = step.device;
    like.axes = static_cast<std::int32_t>(shape.size());
    like.code = static_cast<std::uint8_t>(want.code), like.bits = static_cast<std::uint8_t>(want.bits), like.lanes = 1;
    like.shape = shape.data();
    Managed* managed = nullptr;
    void* object = nullptr;
    auto silent = [](void*, const char*, const char*) {};  // Python allocates again, and says why that fails
    if (step.exchange->allocate(&like, &managed, nullptr, silent) ||
        step.exchange->object_of_managed(managed, &object)) {
        PyErr_Clear();
        return nullptr;
    }
    Owned made(static_cast<PyObject*>(object));
    return look(step, made.get(), tensor) ? std::move(made) : nullptr;
}

// The head's context, for as long as this object lives.
class Current {
  public:
    explicit Current(const Step& step) : step_(step) {
        known_ = !step.driver.get_context(&before_);
        if (known_ && before_ != step.context) known_ = !step.driver.set_context(step.context);
    }
    ~Current() {
        if (known_ && before_ != step_.context) step_.driver.set_context(before_);
    }
    bool known() const { return known_; }

  private:
    const Step& step_;
    void* before_ = nullptr;
    bool known_;
};

// Whether PyTorch may record gradients of an array.
bool may_record(const Step& step, PyObject* const* given) {
    const Owned enabled(PyObject_CallNoArgs(step.grad_enabled));
    if (enabled.get() == Py_False) return false;
    bool unneeded = enabled != nullptr;
    for (int i = 0; unneeded && i < ARRAYS; i++)
        if (given[i] != Py_None) unneeded = Owned(PyObject_GetAttr(given[i], step.requires_grad)).get() == Py_False;
    PyErr_Clear();
    return !unneeded;
}

PyObject* declined() { Py_RETURN_NONE; }

// step(q, k, v, g, beta, out, slots) -> outputs, or None
PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t count) {
    Step& step = *reinterpret_cast<Step*>(self);
    if (count != ARRAYS + 1) {
        PyErr_SetString(PyExc_TypeError, "expected q, k, v, g, beta, out, slots");
        return nullptr;
    }
    std::int64_t values[VALUES] = {};
    Tensor tensors[ARRAYS];
    if (!look(step, given[V], &tensors[V]) || tensors[V].axes < 1) return declined();
    const std::int64_t rows = tensors[V].shape[0];
    if (rows < 1 || rows >= static_cast<std::int64_t>(step.grids.size()) || step.grids[rows].empty()) return declined();
    for (int i = 0; i < OUT; i++) {
        if (step.arrays[i].absent) {
            if (given[i] != Py_None) return declined();
            continue;
        }
        if (i != V && !look(step, given[i], &tensors[i])) return declined();
        if (!take(step.arrays[i], tensors[i], rows, true, &values[ADDRESS + i], &values[STRIDE + i]))
            return declined();
    }
    PyObject* const slots = given[ARRAYS];
    values[SLOTS] = step.all_slots, values[ROWS] = rows, values[ONE] = 1;
    if (slots == Py_None) {
        if (rows > step.capacity) return declined();
    } else {
        Tensor tensor;
        if (!look(step, slots, &tensor) || tensor.axes != 1 || tensor.shape[0] != rows || tensor.code != 0)
            return declined();
        if (tensor.bits != 64 && tensor.bits != 32) return declined();
        if (rows > 1 && tensor.strides && tensor.strides[0] != 1) return declined();
        values[SLOTS] = address_of(tensor), values[SCAN] = rows;
        values[SLOT_FLAGS] = (tensor.bits == 64 ? WIDE : 0) | COUNTED;
    }
    if (may_record(step, given)) return declined();
    const bool allocates = given[OUT] == Py_None;
    const Array &of_v = step.arrays[V], &of_out = step.arrays[OUT];
    if (allocates ? of_v.code != of_out.code || of_v.bits != of_out.bits : !look(step, given[OUT], &tensors[OUT]))
        return declined();  // outputs that are made here are of v's type
    void* stream = nullptr;
    const Current current(step);
    int capturing = 0;
    if (!current.known() || step.exchange->current_stream(step.device_type, step.device, &stream) ||
        step.driver.capture_status(stream, &capturing) || capturing) {
        PyErr_Clear();
        return declined();
    }
    const auto workspace = step.workspaces.find(stream);
    if (workspace == step.workspaces.end()) return declined();
    values[WORKSPACE] = workspace->second;
    Owned made;
    if (allocates && !(made = make_out(step, rows, &tensors[OUT]))) return declined();
    bool fits = take(step.arrays[OUT], tensors[OUT], rows, false, &values[ADDRESS + OUT], &values[STRIDE + OUT]);
    auto end = [&](int i) {
        const std::int64_t row_bytes = step.arrays[i].elements * step.arrays[i].bits / 8;
        return values[ADDRESS + i] + (rows - 1) * values[STRIDE + i] + row_bytes;
    };
    for (int i = 0; fits && i < OUT; i++)  // kernels read some inputs after they have written outputs
        fits = step.arrays[i].absent || values[ADDRESS + i] >= end(OUT) || values[ADDRESS + OUT] >= end(i);
    if (!fits) return declined();
    for (std::size_t i = 0; i < step.kernels.size(); i++) {
        const Kernel& kernel = step.kernels[i];
        for (const Parameter& parameter : kernel.parameters)  // little-endian: the low bytes come first
            std::memcpy(parameter.place, &values[parameter.value], parameter.size);
        kernel.config->grid[0] = step.grids[rows][i].blocks, kernel.config->block[0] = step.grids[rows][i].threads;
        kernel.config->stream = stream;
        if (const int status = step.driver.launch(kernel.config, kernel.function, kernel.arguments, nullptr))
            return PyObject_CallFunction(step.failed, "iiKL", static_cast<int>(i), status,
                                         reinterpret_cast<unsigned long long>(stream),
                                         static_cast<long long>(values[WORKSPACE]));
    }
    return allocates ? made.release() : Py_NewRef(given[OUT]);
}

// set_grids(rows, [(blocks, threads), ...]): a call of so many rows is not declined from now on
PyObject* set_grids(PyObject* self, PyObject* args) {
    Step& step = *reinterpret_cast<Step*>(self);
    Py_ssize_t rows;
    PyObject* given;
    if (!PyArg_ParseTuple(args, "nO!", &rows, &PyList_Type, &given)) return nullptr;
    if (rows < 1 || rows > 1 << 16 || PyList_Size(given) != static_cast<Py_ssize_t>(step.kernels.size())) {
        PyErr_SetString(PyExc_ValueError, "expected at least one row, and a grid for each kernel");
        return nullptr;
    }
    std::vector<Grid> grids(step.kernels.size());
    for (std::size_t i = 0; i < grids.size(); i++)
        if (!PyArg_ParseTuple(PyList_GetItem(given, i), "II", &grids[i].blocks, &grids[i].threads)) return nullptr;
    if (rows >= static_cast<Py_ssize_t>(step.grids.size())) step.grids.resize(rows + 1);
    step.grids[rows] = std::move(grids);
    Py_RETURN_NONE;
}

// set_workspace(stream, address): a call on that stream is not declined from now on
PyObject* set_workspace(PyObject* self, PyObject* args) {
    Step& step = *reinterpret_cast<Step*>(self);
    unsigned long long stream;
    long long address;
    if (!PyArg_ParseTuple(args, "KL", &stream, &address)) return nullptr;
    step.workspaces[reinterpret_cast<void*>(stream)] = address;
    Py_RETURN_NONE;
}

template <class F> void read_address(unsigned long long from, F* function) { *function = reinterpret_cast<F>(from); }

bool read_array(PyObject* given, Array* array) {
    array->absent = given == Py_None;
    if (array->absent) return true;
    PyObject* shape;
    if (!PyArg_ParseTuple(given, "iiO!", &array->code, &array->bits, &PyTuple_Type, &shape)) return false;
    array->elements = 1;
    for (Py_ssize_t i = 0; i < PyTuple_Size(shape); i++) {
        array->shape.push_back(PyLong_AsLongLong(PyTuple_GetItem(shape, i)));
        array->elements *= array->shape.back();
    }
    return !PyErr_Occurred();
}

bool read_kernel(PyObject* given, Kernel* kernel) {
    unsigned long long config, function, arguments;
    PyObject* parameters;
    if (!PyArg_ParseTuple(given, "KKKO!", &config, &function, &arguments, &PyList_Type, &parameters)) return false;
    kernel->config = reinterpret_cast<Config*>(config);
    kernel->function = reinterpret_cast<void*>(function);
    kernel->arguments = reinterpret_cast<void**>(arguments);
    for (Py_ssize_t i = 0; i < PyList_Size(parameters); i++) {
        unsigned long long place;
        int size, value = 0;
        const char* name;
        if (!PyArg_ParseTuple(PyList_GetItem(parameters, i), "Kis", &place, &size, &name)) return false;
        while (value < VALUES && std::strcmp(name, NAMES[value])) value++;
        if (value == VALUES || (size != 4 && size != 8)) {
            PyErr_Format(PyExc_ValueError, "expected the name of a value and a size of 4 or 8, got %s, %d", name, size);
            return false;
        }
        kernel->parameters.push_back({reinterpret_cast<char*>(place), size, value});
    }
    return true;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* named) {
    static const char* const names[] = {"exchange", "tensor_type", "device",       "driver", "arrays",
                                        "kernels",  "slots",       "grad_enabled", "failed", nullptr};
    PyObject *exchange, *tensor_type, *arrays, *kernels, *grad_enabled, *failed;
    int device_type, device;
    unsigned long long launch, get_context, set_context, capture_status;
    long long slots, capacity;
    if (!PyArg_ParseTupleAndKeywords(args, named, "OO(ii)(KKKK)O!O!(LL)OO", const_cast<char**>(names), &exchange,
                                     &tensor_type, &device_type, &device, &launch, &get_context, &set_context,
                                     &capture_status, &PyList_Type, &arrays, &PyList_Type, &kernels, &slots, &capacity,
                                     &grad_enabled, &failed))
        return nullptr;
    auto* const api = static_cast<const Exchange*>(PyCapsule_GetPointer(exchange, "dlpack_exchange_api"));
    if (!api) return nullptr;
    if (api->header.major != 1 || !api->tensor_of_object || PyList_Size(arrays) != ARRAYS) {
        PyErr_SetString(PyExc_ValueError, "expected DLPack 1 with views of tensors, and 6 arrays");
        return nullptr;
    }
    auto* const allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    Owned requires_grad(PyUnicode_InternFromString("requires_grad"));
    PyObject* const self = requires_grad ? allocate(type, 0) : nullptr;
    if (!self) return nullptr;
    Step& step = *reinterpret_cast<Step*>(self);
    new (&step.arrays) Array[ARRAYS];
    new (&step.kernels) std::vector<Kernel>;
    new (&step.grids) std::vector<std::vector<Grid>>;
    new (&step.workspaces) std::unordered_map<void*, std::int64_t>;
    step.exchange = api, step.tensor_type = Py_NewRef(tensor_type), step.failed = Py_NewRef(failed);
    step.grad_enabled = Py_NewRef(grad_enabled), step.requires_grad = requires_grad.release();
    step.device_type = device_type, step.device = device, step.all_slots = slots, step.capacity = capacity;
    read_address(launch, &step.driver.launch), read_address(get_context, &step.driver.get_context);
    read_address(set_context, &step.driver.set_context), read_address(capture_status, &step.driver.capture_status);
    bool read = true;
    for (int i = 0; read && i < ARRAYS; i++) read = read_array(PyList_GetItem(arrays, i), &step.arrays[i]);
    step.kernels.resize(PyList_Size(kernels));
    for (std::size_t i = 0; read && i < step.kernels.size(); i++)
        read = read_kernel(PyList_GetItem(kernels, i), &step.kernels[i]);
    if (read && step.driver.get_context(&step.context)) {
        PyErr_SetString(PyExc_RuntimeError, "expected a current context");
        read = false;
    }
    if (read) return self;
    Py_DECREF(self);
    return nullptr;
}

void end(PyObject* self) {
    Step& step = *reinterpret_cast<Step*>(self);
    PyTypeObject* const type = Py_TYPE(self);
    for (Array& array : step.arrays) array.~Array();
    step.kernels.~vector(), step.grids.~vector(), step.workspaces.~unordered_map();
    for (PyObject* object : {step.tensor_type, step.grad_enabled, step.requires_grad, step.failed}) Py_DECREF(object);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"step", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL, nullptr},
    {"set_grids", set_grids, METH_VARARGS, nullptr},
    {"set_workspace", set_workspace, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(end)},
    {Py_tp_methods, methods},
    {0, nullptr},
};
PyType_Spec spec = {"sketchssm.cuda._direct.Step", sizeof(Step), 0, Py_TPFLAGS_DEFAULT, slots};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_direct", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__direct() {
    PyObject* const module = PyModule_Create(&definition);
    PyObject* const type = PyType_FromSpec(&spec);
    if (!module || !type || PyModule_AddObject(module, "Step", type)) return nullptr;
    if (PyModule_AddStringConstant(module, "SOURCE", SOURCE)) return nullptr;  // the hash of this file
    return module;
}
