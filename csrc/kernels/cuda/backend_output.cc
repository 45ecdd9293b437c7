// The end of a step: final norm, logits, sampling, and what requests asked to be told.
#include <algorithm>

#include "kernels/cuda/backend.h"
#include "kernels/cuda/error.h"

namespace turbomill::cuda {

void CudaBackend::project(Buffer& delta, Buffer& x, const float* norm, const DeviceLinear& head, int slice,
                          int begin, int count) {
    cuda::rms_norm(type_,
                   {static_cast<float*>(x.data()), delta.data(),
                    row_numbers_.as<int>() + step_.first_rows[slice] + begin, false, norm, normed_.as(),
                    count, model_.hidden_size, model_.norm_eps},
                   stream_);
    output_linear(head, count);
}

void CudaBackend::output_linear(const DeviceLinear& head, int count) {
    linear_(head, normed_.as(), count, logits_.as(), DType::F32);
    if (model_.logit_softcap > 0.f)
        softcap(logits_.as<float>(), int64_t(count) * model_.vocab_size, model_.logit_softcap, stream_);
}

void CudaBackend::copy_logprobs(Buffer& delta, Buffer& x, const float* norm, const DeviceLinear& head,
                                int slice, BatchData& batch) {
    const Slice& s = batch.slices[slice];
    auto& out = batch.logprobs[slice];
    out.resize(s.length);
    for (int begin = 0; begin < s.length; begin += logit_rows_) {
        const int count = std::min(logit_rows_, s.length - begin);
        project(delta, x, norm, head, slice, begin, count);
        check(cudaMemcpyAsync(targets_.as(), s.targets.data() + begin, size_t(count) * 4,
                              cudaMemcpyHostToDevice, stream_),
              "sending a prompt's next tokens");
        logprobs(logits_.as<float>(), model_.vocab_size, nullptr, s.sampling.prompt_logprobs,
                 targets_.as<int>(), count, target_logprobs_.as<LogprobRow>(), stream_);
        check(cudaMemcpyAsync(out.data() + begin, target_logprobs_.as(), size_t(count) * sizeof(LogprobRow),
                              cudaMemcpyDeviceToHost, stream_),
              "copying a prompt's logprobs");
    }
}

void CudaBackend::copy_logits(Buffer& delta, Buffer& x, const float* norm, const DeviceLinear& head,
                              int slice, BatchData& batch) {
    const int length = batch.slices[slice].length;
    auto& logits = batch.logits[slice];
    logits.resize(size_t(length) * model_.vocab_size);
    for (int begin = 0; begin < length; begin += logit_rows_) {
        const int count = std::min(logit_rows_, length - begin);
        project(delta, x, norm, head, slice, begin, count);
        check(cudaMemcpyAsync(logits.data() + size_t(begin) * model_.vocab_size, logits_.as(),
                              size_t(count) * model_.vocab_size * 4, cudaMemcpyDeviceToHost, stream_),
              "copying logits");
    }
}

void CudaBackend::finish(Buffer& delta, Buffer& x, const std::vector<float>& norm, const Linear& head,
                         BatchData& batch) {
    const DeviceLinear output = device_view(head, weights_);
    const float* weight = weights_.at(norm);
    for (int i = 0; i < int(batch.slices.size()); ++i) {
        if (batch.slices[i].return_logits) copy_logits(delta, x, weight, output, i, batch);
        if (!batch.slices[i].targets.empty()) copy_logprobs(delta, x, weight, output, i, batch);
    }
    const int count = step_.sample_count;
    if (count == 0) return;
    cuda::rms_norm(type_,
                   {static_cast<float*>(x.data()), delta.data(), step_.sampled_rows(), false, weight,
                    normed_.as(), count, model_.hidden_size, model_.norm_eps},
                   stream_);
    output_linear(output, count);
    const float* logits = logits_.as<float>();
    if (edits_.view().count > 0) {
        // A copy: logprobs are of the model's own.
        if (!edited_.bytes())
            edited_ = DeviceMemory(logits_.bytes(), "edited logits", "lower max_batch_size");
        check(cudaMemcpyAsync(edited_.as(), logits_.as(), size_t(count) * model_.vocab_size * 4,
                              cudaMemcpyDeviceToDevice, stream_),
              "copying logits");
        edit_logits(edited_.as<float>(), model_.vocab_size, edits_.view(), last_token_.as<int>(), stream_);
        logits = edited_.as<float>();
    }
    sample(logits, model_.vocab_size, step_.samples(), count, results_.as<int>(), last_token_.as<int>(),
           sample_parts_.as<SamplePart>(), stream_);
    if (step_.wants_logprobs)
        logprobs(logits_.as<float>(), model_.vocab_size, step_.samples(), 0, results_.as<int>(), count,
                 sampled_logprobs(), stream_);
}

}  // namespace turbomill::cuda
