#include "kernels/cuda/gemm.h"

#include <cublasLt.h>

#include <map>
#include <string>
#include <tuple>

#include "kernels/cuda/error.h"
#include "kernels/cuda/memory.h"

namespace turbomill::cuda {
namespace {

constexpr size_t kWorkspace = 32u << 20;  // what cuBLAS recommends for Hopper

void check(cublasStatus_t status, const char* what) {
    if (status != CUBLAS_STATUS_SUCCESS)
        throw CudaError(std::string("cuBLASLt: ") + what + ": " + cublasLtGetStatusString(status));
}

cudaDataType_t data_type(DType type) {
    switch (type) {
        case DType::F32:
            return CUDA_R_32F;
        case DType::F16:
            return CUDA_R_16F;
        case DType::BF16:
            return CUDA_R_16BF;
        case DType::U8:
        case DType::I32:
            break;
    }
    throw std::invalid_argument("no GEMM on whole numbers");
}

struct Layout {
    Layout(DType type, int rows, int columns, int stride) {  // column-major
        check(cublasLtMatrixLayoutCreate(&handle, data_type(type), rows, columns, stride), "layout");
    }
    ~Layout() { cublasLtMatrixLayoutDestroy(handle); }
    Layout(const Layout&) = delete;
    Layout& operator=(const Layout&) = delete;

    cublasLtMatrixLayout_t handle = nullptr;
};

// A shape's operands as cuBLAS sees them, column-major: y^T [N, rows] = w^T^T [N, K] x^T [K, rows].
struct Plan {
    Plan(cublasLtHandle_t lt, DType type, DType out, int rows, int n, int k, int stride)
        : w(type, k, n, k), x(type, k, rows, k), y(out, n, rows, stride) {
        check(cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F), "operation");
        const cublasOperation_t transpose = CUBLAS_OP_T;
        check(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof transpose),
              "transpose");
        cublasLtMatmulPreference_t preference = nullptr;
        check(cublasLtMatmulPreferenceCreate(&preference), "preference");
        const size_t workspace = kWorkspace;
        check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                   &workspace, sizeof workspace),
              "workspace");
        cublasLtMatmulHeuristicResult_t result;
        int found = 0;
        const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
            lt, op, w.handle, x.handle, y.handle, y.handle, preference, 1, &result, &found);
        cublasLtMatmulPreferenceDestroy(preference);
        check(status, "choosing an algorithm");
        if (!found) check(CUBLAS_STATUS_NOT_SUPPORTED, "no algorithm for this shape");
        algorithm = result.algo;
    }
    ~Plan() { cublasLtMatmulDescDestroy(op); }
    Plan(const Plan&) = delete;
    Plan& operator=(const Plan&) = delete;

    cublasLtMatmulDesc_t op = nullptr;
    Layout w, x, y;
    cublasLtMatmulAlgo_t algorithm;
};

}  // namespace

struct Gemm::State {
    State() : workspace(kWorkspace, "cuBLASLt's workspace", "free GPU memory") {
        check(cublasLtCreate(&handle), "create");
    }
    ~State() { cublasLtDestroy(handle); }

    cublasLtHandle_t handle = nullptr;
    DeviceMemory workspace;
    std::map<std::tuple<DType, DType, int, int, int, int>, std::unique_ptr<Plan>> plans;
};

Gemm::Gemm() : state_(std::make_unique<State>()) {}
Gemm::~Gemm() = default;

void Gemm::operator()(DType type, DType out, const void* w, const void* x, void* y, int rows, int n, int k,
                      int stride, cudaStream_t stream) {
    if (rows == 0) return;
    auto& plan = state_->plans[{type, out, rows, n, k, stride}];
    if (!plan) plan = std::make_unique<Plan>(state_->handle, type, out, rows, n, k, stride);
    const float one = 1.f, zero = 0.f;
    check(cublasLtMatmul(state_->handle, plan->op, &one, w, plan->w.handle, x, plan->x.handle, &zero, y,
                         plan->y.handle, y, plan->y.handle, &plan->algorithm, state_->workspace.as(),
                         kWorkspace, stream),
          "matmul");
}

}  // namespace turbomill::cuda
