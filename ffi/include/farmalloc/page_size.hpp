// The page size of the published collective interface; see collective_allocator_traits.hpp.
#ifndef FARHEAP_FARMALLOC_PAGE_SIZE_HPP
#define FARHEAP_FARMALLOC_PAGE_SIZE_HPP

#include <cstddef>

namespace FarMalloc {
inline constexpr std::size_t PageSize = 4096;
} // namespace FarMalloc

#endif
