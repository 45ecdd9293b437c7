#include "kernels/cuda/launch.h"
#include "kernels/cuda/overlap.cuh"

namespace turbomill::cuda {
namespace {

thread_local int known_device = -1;
thread_local bool device_overlaps = false;
thread_local int apart = 0;  // NoOverlaps that live

}  // namespace

NoOverlap::NoOverlap() {
    ++apart;
}

NoOverlap::~NoOverlap() {
    --apart;
}

bool overlaps_launches() {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    if (device != known_device) {
        int major = 0;
        check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "the capability");
        device_overlaps = major >= 9;
        known_device = device;
    }
    return device_overlaps && apart == 0;
}

}  // namespace turbomill::cuda
