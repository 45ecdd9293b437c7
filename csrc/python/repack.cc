// The submodule `repack`: store/repack.h and store/words.h on numpy arrays.
#include "store/repack.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "python/register.h"
#include "store/words.h"

namespace turbomill::python {
namespace {

namespace py = pybind11;
using Bytes = py::array_t<uint8_t, py::array::c_style>;
using Words = py::array_t<int32_t, py::array::c_style>;

void require(bool good, const char* what) {
    if (!good) throw std::invalid_argument(what);
}

int tiles(py::ssize_t size) {
    return int((size + 63) / 64);
}

const uint32_t* words_of(const Words& words) {
    return reinterpret_cast<const uint32_t*>(words.data());
}

// A new array that `fill(bytes, pool)` writes, without the interpreter's lock.
template <class Fill>
Bytes filled(const std::vector<py::ssize_t>& shape, int threads, const Fill& fill) {
    Bytes out(shape);
    uint8_t* bytes = out.mutable_data();
    {
        const py::gil_scoped_release unlocked;
        ThreadPool pool(threads);
        fill(bytes, pool);
    }
    return out;
}

// The rows of matrices [K, n] that are fused.
FusedRows fused(const std::vector<int>& sizes, int block) {
    require(!sizes.empty() && block >= 0, "there must be parts");
    for (const int size : sizes)
        require(!block || (size == sizes[0] && size % block == 0),
                "parts in turn must be of one size, a multiple of the block");
    return {sizes, block};
}

Bytes pack_narrow(const std::vector<Bytes>& parts, int block, int threads) {
    CodeParts codes;
    std::vector<int> sizes;
    const py::ssize_t k = !parts.empty() && parts[0].ndim() == 2 ? parts[0].shape(0) : -1;
    for (const Bytes& part : parts) {
        require(part.ndim() == 2 && part.shape(0) == k, "codes must be [K, N], of one K");
        codes.parts.push_back(part.data());
        sizes.push_back(int(part.shape(1)));
    }
    codes.rows = fused(sizes, block);
    return filled({tiles(codes.rows.n()), tiles(k), 4, 32, 16}, threads,
                  [&](uint8_t* to, auto& pool) { pack_w4(codes, int(k), to, pool); });
}

Packing packing_of(const std::string& name) {
    if (name == "awq") return Packing::kAwq;
    if (name == "kn") return Packing::kKN;
    require(name == "nk", "packing must be awq, kn or nk");
    return Packing::kNK;
}

void pack_tiles_of_words(const std::string& packing, const std::vector<Words>& parts, int k, int block,
                         int first, const py::buffer& out) {
    WordParts words{packing_of(packing), {}, {}, k};
    std::vector<int> sizes;
    require(k > 0 && k % 8 == 0 && block % 8 == 0, "K and the block must be multiples of 8");
    for (const Words& part : parts) {
        require(part.ndim() == 2, "words must have two dimensions");
        const int rows = int(part.shape(0)), columns = int(part.shape(1));
        const bool awq = words.packing == Packing::kAwq, nk = words.packing == Packing::kNK;
        sizes.push_back(awq ? 8 * columns : nk ? rows : columns);
        require((nk ? columns : rows) == (awq ? k : k / 8) && sizes.back() % 8 == 0,
                "words must be [K, N/8] (awq), [K/8, N] (kn) or [N, K/8] (nk), N a multiple of 8");
        words.parts.push_back(words_of(part));
    }
    words.rows = fused(sizes, block);
    const py::buffer_info to = out.request(true);
    const py::ssize_t row = py::ssize_t(tiles(k)) * 2048, count = to.size / row;
    require(to.itemsize == 1 && to.ndim == 1 && to.strides[0] == 1 && to.size == count * row && first >= 0 &&
                first + count <= tiles(words.rows.n()),
            "out must be bytes of whole rows of tiles");
    const py::gil_scoped_release unlocked;
    pack_words(words, first, int(count), static_cast<uint8_t*>(to.ptr));
}

Bytes pack_wide(const Bytes& codes, int threads) {
    require(codes.ndim() == 2, "codes must be [K, N]");
    const int k = int(codes.shape(0)), n = int(codes.shape(1));
    return filled({tiles(n), tiles(k), 4, 8, 2, 64}, threads,
                  [&, from = codes.data()](uint8_t* to, auto& pool) { pack_w8(from, k, n, to, pool); });
}

Bytes unpack(const Bytes& packed, int k, int n, int threads, bool wide) {
    require(packed.ndim() == (wide ? 6 : 5) && packed.shape(0) == tiles(n) && packed.shape(1) == tiles(k) &&
                packed.size() == py::ssize_t(tiles(n)) * tiles(k) * (wide ? 4096 : 2048),
            wide ? "packed must be [ceil(N/64), ceil(K/64), 4, 8, 2, 64]"
                 : "packed must be [ceil(N/64), ceil(K/64), 4, 32, 16]");
    return filled({k, n}, threads, [&, from = packed.data()](uint8_t* to, auto& pool) {
        (wide ? unpack_w8 : unpack_w4)(from, k, n, to, pool);
    });
}

Bytes awq(const Words& words, int threads) {
    require(words.ndim() == 2, "words must be [R, N/8]");
    const int rows = int(words.shape(0)), n = int(words.shape(1)) * 8;
    return filled({rows, n}, threads, [&, from = words_of(words)](uint8_t* to, auto& pool) {
        unpack_awq(from, rows, n, to, pool);
    });
}

Bytes nibbles(const Words& words, int k, int threads) {
    require(words.ndim() == 2 && words.shape(0) == (k + 7) / 8, "words must be [ceil(K/8), N]");
    const int n = int(words.shape(1));
    return filled({k, n}, threads, [&, from = words_of(words)](uint8_t* to, auto& pool) {
        unpack_nibbles(from, k, n, to, pool);
    });
}

}  // namespace

void register_repack(py::module_& parent) {
    py::module_ m = parent.def_submodule("repack", "Byte orders of codes; threads 0: every core.");
    for (const bool wide : {false, true}) {
        const std::string layout = wide ? "w8" : "w4";
        m.def(("unpack_" + layout).c_str(),
              [wide](const Bytes& packed, int k, int n, int threads) {
                  return unpack(packed, k, n, threads, wide);
              },
              py::arg("packed"), py::arg("k"), py::arg("n"), py::arg("threads") = 0);
    }
    m.def("pack_w4", &pack_narrow, py::arg("parts"), py::arg("block") = 0, py::arg("threads") = 0);
    m.def("pack_words", &pack_tiles_of_words, py::arg("packing"), py::arg("parts"), py::arg("k"),
          py::arg("block"), py::arg("first"), py::arg("out"));
    m.def("pack_w8", &pack_wide, py::arg("codes"), py::arg("threads") = 0);
    m.def("unpack_awq", &awq, py::arg("words"), py::arg("threads") = 0);
    m.def("unpack_nibbles", &nibbles, py::arg("words"), py::arg("k"), py::arg("threads") = 0);
}

}  // namespace turbomill::python
