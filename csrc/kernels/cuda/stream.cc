#include "kernels/cuda/stream.h"

#include "kernels/cuda/error.h"

namespace turbomill::cuda {

Stream::Stream() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
}

Stream::~Stream() {
    cudaStreamDestroy(stream_);
}

Event::Event() {
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "creating an event");
}

Event::~Event() {
    cudaEventDestroy(event_);
}

}  // namespace turbomill::cuda
