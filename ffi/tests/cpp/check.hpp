// What the C++ tests share. Not assert(): it must hold in every build.
#ifndef CHECK_HPP
#define CHECK_HPP

#include "farheap.hpp"

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                                      \
    do {                                                                                      \
        if (!(condition)) {                                                                   \
            std::fprintf(stderr, "%s:%d: %s: last error %s\n", __FILE__, __LINE__, #condition, \
                         farheap_last_message());                                             \
            std::exit(1);                                                                     \
        }                                                                                     \
    } while (0)

// Runs what must throw `Exception` with a code.
template <class Exception, class Body> void throws(farheap::status code, Body body) {
    try {
        body();
    } catch (const Exception &error) {
        CHECK(error.code() == code && error.what()[0] != '\0');
        return;
    }
    CHECK(!"an exception was expected");
}

// Runs `main_body`; ends the program as skipped when far memory is not permitted.
template <class Body> int run(Body main_body) {
    try {
        main_body();
    } catch (const farheap::error &error) {
        if (error.code() == FARHEAP_E_UFFD_UNAVAILABLE) {
            std::printf("skipped: %s\n", error.what());
            return 77;
        }
        std::fprintf(stderr, "%s: %s\n", error.name(), error.what());
        return 1;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}

constexpr std::size_t mib = std::size_t{1} << 20;

// A path for a table that goes with the object.
struct table_path {
    std::string path;
    table_path() {
        const char *dir = std::getenv("TMPDIR");
        path = std::string(dir ? dir : "/tmp") + "/farheap-table-XXXXXX";
        const int file = mkstemp(path.data());
        CHECK(file >= 0);
        std::fclose(fdopen(file, "w"));
        std::remove(path.c_str());
    }
    ~table_path() { std::remove(path.c_str()); }
};

#endif
