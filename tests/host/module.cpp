// sketchssm._cuda_host: loads kernels that g++ compiled and launches them on NumPy arrays.
#include <dlfcn.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

namespace py = pybind11;

namespace {

struct Launch {  // as in device.h
    unsigned grid[3], block[3];
    std::uint64_t shared_bytes, seed;
    void** arguments;
};

struct Parameter {
    bool pointer, writes;
    char kind;  // of the number or of what a pointer leads to: f, i, u, or V for a structure
    std::size_t size;
    std::string text;
};

std::vector<Parameter> parse(const char* signature) {
    std::vector<Parameter> parameters;
    std::stringstream all(signature);
    for (std::string text; std::getline(all, text, ';');) {
        const std::size_t at = text.rfind(' ') + 1;  // 0 without a qualifier
        parameters.push_back({at > 0, text.rfind("mutable", 0) == 0, text[at], std::stoul(text.substr(at + 1)), text});
    }
    return parameters;
}

class Kernel {
  public:
    Kernel(std::string name, std::vector<Parameter> parameters, const char* (*launch)(const Launch&))
        : name_(std::move(name)), parameters_(std::move(parameters)), launch_(launch) {}

    void operator()(std::array<unsigned, 3> grid, std::array<unsigned, 3> block, const py::sequence& arguments,
                    std::uint64_t shared_bytes, std::uint64_t seed) const {
        if (arguments.size() != parameters_.size())
            throw py::type_error(name_ + ": expected " + std::to_string(parameters_.size()) + " arguments, got " +
                                 std::to_string(arguments.size()));
        std::vector<std::uint64_t> values(arguments.size());
        std::vector<void*> addresses;
        for (std::size_t i = 0; i < values.size(); i++) {
            store(i, arguments[i], &values[i]);
            addresses.push_back(&values[i]);
        }
        Launch launch{
            {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared_bytes, seed, addresses.data()};
        if (const char* failure = launch_(launch)) throw std::runtime_error(failure);
    }

  private:
    void store(std::size_t i, const py::object& value, void* to) const {
        const Parameter& p = parameters_[i];
        auto wrong = [&](const std::string& got) {
            throw py::type_error(name_ + ": argument " + std::to_string(i) + ": expected " + p.text + ", got " + got);
        };
        if (p.pointer && py::isinstance<py::array>(value)) {
            const auto array = value.cast<py::array>();
            const char kind = array.dtype().kind();
            // Two-byte types share one carrier, and a structure is a piece of an array of any type.
            const bool fits = p.kind == 'V' || (array.itemsize() == static_cast<py::ssize_t>(p.size) &&
                                                (p.size == 2 || kind == p.kind || (kind == 'b' && p.size == 1)));
            if (!fits) wrong("an array of " + py::str(array.dtype()).cast<std::string>());
            if (p.writes && !array.writeable()) wrong("a read-only array");
            const void* const data = array.data();
            std::memcpy(to, &data, sizeof data);
            return;
        }
        try {
            if (p.pointer) {
                if (!value.is_none() && value.cast<std::uint64_t>() != 0) wrong("a number that is no null pointer");
            } else if (p.kind == 'f') {
                const double x = value.cast<double>();
                const float narrow = static_cast<float>(x);
                p.size == 4 ? std::memcpy(to, &narrow, 4) : std::memcpy(to, &x, 8);
            } else {
                const auto x = value.cast<std::int64_t>();
                if (p.size < 8 && x >> (8 * p.size) != 0 && x >> (8 * p.size - 1) != -1) wrong("a number out of range");
                std::memcpy(to, &x, p.size);
            }
        } catch (const py::cast_error&) {
            wrong(py::repr(value).cast<std::string>());
        }
    }

    std::string name_;
    std::vector<Parameter> parameters_;
    const char* (*launch_)(const Launch&);
};

class Module {
  public:
    explicit Module(const std::string& path) : handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
        if (!handle_) throw std::runtime_error(dlerror());
    }

    Kernel kernel(const std::string& name) const {
        const auto signature = reinterpret_cast<const char* (*)()>(symbol("signature_of_" + name));
        const auto launch = reinterpret_cast<const char* (*)(const Launch&)>(symbol("launch_" + name));
        return {name, parse(signature()), launch};
    }

    py::memoryview variable(const std::string& name) const {
        const auto address = reinterpret_cast<void* (*)()>(symbol("address_of_" + name));
        const auto size = reinterpret_cast<std::size_t (*)()>(symbol("size_of_" + name));
        return py::memoryview::from_memory(address(), static_cast<py::ssize_t>(size()));
    }

  private:
    void* symbol(const std::string& name) const {
        void* const found = dlsym(handle_, name.c_str());
        if (!found) throw py::key_error(name);
        return found;
    }

    void* handle_;  // stays open: kernels of it may outlive the module
};

}  // namespace

PYBIND11_MODULE(_cuda_host, m) {
    m.doc() = "Launches CUDA kernels that were compiled for the host; test equipment, see tests/host/README.md.";
    py::class_<Kernel>(m, "Kernel")
        .def("__call__", &Kernel::operator(), py::arg("grid"), py::arg("block"), py::arg("args"),
             py::arg("shared_bytes") = 0, py::arg("seed") = 0);
    py::class_<Module>(m, "Module")
        .def(py::init<std::string>(), py::arg("path"))
        .def("kernel", &Module::kernel, py::arg("name"))
        .def("variable", &Module::variable, py::arg("name"));
}
