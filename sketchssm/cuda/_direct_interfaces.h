// The parts of two binary interfaces that `_direct.cpp` uses: DLPack's and the CUDA driver's.
#pragma once

#include <cstdint>

namespace {

// DLPack

struct Tensor {
    void* data;
    std::int32_t device_type, device;
    std::int32_t axes;
    std::uint8_t code, bits;
    std::uint16_t lanes;
    const std::int64_t *shape, *strides;  // strides in elements
    std::uint64_t byte_offset;
};

struct Managed;  // a tensor that owns its memory

struct Exchange {
    struct {
        std::uint32_t major, minor;
        void* older;
    } header;
    int (*allocate)(const Tensor* like, Managed** made, void* context,
                    void (*fail)(void* context, const char* kind, const char* message));
    int (*managed_of_object)(void* object, Managed** made);
    int (*object_of_managed)(Managed* managed, void** object);
    int (*tensor_of_object)(void* object, Tensor* tensor);
    int (*current_stream)(std::int32_t device_type, std::int32_t device, void** stream);
};

// The driver's CUlaunchConfig.
struct Config {
    unsigned grid[3], block[3], shared;
    void* stream;
    void* attributes;
    unsigned attribute_count;
};

struct Driver {
    int (*launch)(Config* config, void* function, void** arguments, void** extra);
    int (*get_context)(void** context);
    int (*set_context)(void* context);
    int (*capture_status)(void* stream, int* status);
};

}  // namespace
