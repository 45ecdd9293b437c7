// Decode steps recorded as CUDA graphs: one launch in place of hundreds.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <map>

namespace turbomill::cuda {

// The rows that a step of `count` decodes has with its padding: one of few numbers, each recorded once.
int padded_rows(int count, int max_batch_size);

class StepGraphs {
  public:
    StepGraphs() = default;
    ~StepGraphs();
    StepGraphs(const StepGraphs&) = delete;
    StepGraphs& operator=(const StepGraphs&) = delete;

    // Queues `calls`, all of whose work and pointers `rows` determines: as they are at the first time, when
    // libraries choose their algorithms; recorded at the second, and repeated from then on. Returns whether
    // a recording ran.
    bool run(int rows, const std::function<void()>& calls, cudaStream_t stream);

    // Forgets every recording; none is running.
    void clear();

  private:
    std::map<int, cudaGraphExec_t> recorded_;  // null: seen once
};

}  // namespace turbomill::cuda
