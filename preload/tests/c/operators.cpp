// All forms of new and delete, which are the C++ library's on this malloc.
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <vector>

struct alignas(128) Wide { char bytes[300]; };

int main() {
    std::map<int, std::string> map;
    for (int n = 0; n < 60000; n++) map[n] = std::string(200, char('a' + n % 26));
    for (auto &entry : map) if (entry.second[199] != 'a' + entry.first % 26) return 1;
    for (int n = 0; n < 1000; n++) {
        auto wide = std::make_unique<Wide>();
        if (reinterpret_cast<std::uintptr_t>(wide.get()) % 128) return 2;
        std::unique_ptr<Wide[]> many(new Wide[5]);
        if (reinterpret_cast<std::uintptr_t>(many.get()) % 128) return 3;
        delete new (std::nothrow) int(n);
        delete[] new (std::nothrow) char[n + 1];
        ::operator delete(::operator new(n), std::size_t(n));
        ::operator delete(::operator new(n, std::align_val_t(64)), std::size_t(n), std::align_val_t(64));
    }
    volatile std::size_t huge = SIZE_MAX / 4;
    try {
        std::vector<char> block(huge);
        return 4;
    } catch (const std::bad_alloc &) {
    }
    if (::operator new(huge, std::nothrow)) return 5;
    std::puts("right");
}
