// Hopper's asynchronous copies, barriers in shared memory, clusters and launch dependences, as one-line
// wrappers of their PTX instructions. To be called in code for sm_90a only. Places in shared memory are
// 32-bit addresses, so that none of their arithmetic is done in 64 bits.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace turbomill::cuda {

__device__ inline unsigned shared_address(const void* shared) {
    return unsigned(__cvta_generic_to_shared(shared));
}

__device__ inline uint4 load_shared_16(unsigned shared) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(shared)
                 : "memory");
    return v;
}
__device__ inline unsigned load_shared_4(unsigned shared) {
    unsigned v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared) : "memory");
    return v;
}

// A barrier whose phase ends when `count` arrivals and all announced bytes are in.
__device__ inline void barrier_init(unsigned barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Makes initialised barriers visible to the copy engine.
__device__ inline void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and announces bytes that copies will bring.
__device__ inline void barrier_expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
// Waits until the phase of that parity has ended.
__device__ inline void barrier_wait(unsigned barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// A box of a two-dimensional tensor; what lies outside of the tensor arrives as zeros, and counts.
__device__ inline void copy_box(unsigned shared, const CUtensorMap& map, int x, int y, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(shared),
        "l"(&map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}
// Of a three-dimensional one.
__device__ inline void copy_box(unsigned shared, const CUtensorMap& map, int x, int y, int z,
                                unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
        "%4}], "
        "[%5];" ::"r"(shared),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}
// Of a four-dimensional one.
__device__ inline void copy_box(unsigned shared, const CUtensorMap& map, int x, int y, int z, int w,
                                unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
        "%4, %5}], "
        "[%6];" ::"r"(shared),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
        : "memory");
}
// Of a five-dimensional one.
__device__ inline void copy_box(unsigned shared, const CUtensorMap& map, int x, int y, int z, int w, int v,
                                unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
        "%4, %5, %6}], "
        "[%7];" ::"r"(shared),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "r"(barrier)
        : "memory");
}
__device__ inline void prefetch_map(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// What this thread wrote to shared memory is seen by the copy engine and by wgmma after the next barrier.
__device__ inline void fence_for_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Warps of one named barrier (1 to 15) meet.
__device__ inline void meet(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Counts towards a named barrier without waiting there.
__device__ inline void pass(int name, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// All threads of the cluster meet; what they wrote to shared memory before is visible to all after.
__device__ inline void cluster_meet() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}
// The same in two steps.
__device__ inline void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same place in another block's shared memory, and a float written there.
__device__ inline unsigned remote_address(const void* shared, int rank) {
    unsigned address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
    return address;
}
__device__ inline void store_remote(unsigned address, float v) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
// Four floats at the same place of another block's shared memory.
__device__ inline float4 load_remote(const float* shared, int rank) {
    const unsigned address = remote_address(shared, rank);
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

// A warpgroup gives registers back, or takes what others gave: `Count` a thread from here on.
template <int Count>
__device__ inline void registers_down() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ inline void registers_up() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

// The next kernel of the stream may start as far as it does not depend on this one.
__device__ inline void launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Waits until the kernels before this one are done and their results visible.
__device__ inline void wait_dependences() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace turbomill::cuda
