// Addresses of pieces of global memory at equal distances: rows of a caller's array, or one part of the slots' memory.
#pragma once
#include "lib/ptx.cuh"

template <class T> struct BytesOf { typedef char type; };
template <class T> struct BytesOf<const T> { typedef const char type; };

// The first piece, and the distance between pieces. The distance is in bytes, so that an address takes one
// multiplication and no shift.
template <class T> struct Strided {
    T* first;
    int stride;

    DEVICE T* of(int index) const {
        typedef typename BytesOf<T>::type bytes;
        return reinterpret_cast<T*>(reinterpret_cast<bytes*>(first) + static_cast<i64>(index) * stride);
    }
};
