// Accounts in pages of a table file, twice what the pool may hold: transfers between them under
// exclusive guards, audits under optimistic ones, temporary memory for the report.
#include <farheap.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <thread>

namespace {

constexpr std::uint64_t limit = 16 << 20;
constexpr std::size_t pages = 8'192, accounts_per_page = 500;
constexpr std::int64_t opening = 1'000;

std::int64_t total(const farheap::page_guard &page) {
    std::int64_t sum = 0;
    for (std::size_t i = 0; i < accounts_per_page; i++) sum += page.read<std::int64_t>(8 * i);
    return sum;
}

int work(const std::string &path) {
    farheap::manager manager(limit);
    farheap::pool pool = farheap::pool::create(manager, path, 4096 * (pages + 64));
    std::vector<std::uint64_t> ids;
    for (std::size_t i = 0; i < pages; i++) {
        farheap::exclusive_guard page = pool.allocate();
        for (std::size_t k = 0; k < accounts_per_page; k++) page.write(8 * k, opening);
        ids.push_back(page.id());
    }
    const auto transfer = [&](unsigned seed) {
        std::uint64_t state = seed;
        for (int i = 0; i < 20'000; i++) {
            state = state * 6'364'136'223'846'793'005u + 1'442'695'040'888'963'407u;
            // Within a page, so that each page's total stays what it was.
            farheap::exclusive_guard page = pool.fix_exclusive(ids[(state >> 33) % pages]);
            const std::size_t from = 8 * ((state >> 20) % accounts_per_page);
            const std::size_t to = 8 * ((state >> 10) % accounts_per_page);
            page.write(from, page.read<std::int64_t>(from) - 1);
            page.write(to, page.read<std::int64_t>(to) + 1);
        }
    };
    std::thread other(transfer, 1);
    transfer(2);
    bool right = true;
    for (std::size_t i = 0; i < pages; i += 16) {
        const std::vector<std::uint64_t> group(ids.begin() + static_cast<std::ptrdiff_t>(i),
                                               ids.begin() + static_cast<std::ptrdiff_t>(i + 16));
        pool.prefetch(group);
        for (std::uint64_t id : group) right = right && pool.read_optimistic(id, total) == opening * 500;
    }
    other.join();
    farheap::temporary_resource query(manager);
    std::pmr::vector<std::int64_t> balances(&query);
    for (std::uint64_t id : ids) balances.push_back(pool.fix_shared(id).read<std::int64_t>(0));
    std::sort(balances.begin(), balances.end());
    pool.flush();
    const farheap::pool_stats stats = pool.stats();
    std::printf("%zu pages, %zu read, %zu written, %zu MiB in use of %zu; balances from %lld to %lld\n",
                pages, static_cast<std::size_t>(stats.pages_read),
                static_cast<std::size_t>(stats.pages_written),
                static_cast<std::size_t>(manager.stats().used_bytes >> 20),
                static_cast<std::size_t>(manager.limit() >> 20),
                static_cast<long long>(balances.front()), static_cast<long long>(balances.back()));
    std::printf("%s\n", right ? "every page's total is right" : "money was lost");
    return right && manager.stats().used_bytes_max <= limit ? 0 : 1;
}

} // namespace

int main() {
    const char *dir = std::getenv("TMPDIR");
    // mkstemp(3) puts a name of its own in place of the last six letters.
    std::string path = std::string(dir ? dir : "/tmp") + "/farheap-pages-XXXXXX";
    const int file = mkstemp(path.data());
    if (file < 0) return 1;
    std::fclose(fdopen(file, "w"));
    std::filesystem::remove(path); // A table file of its own size is made in its place.
    int status = 1;
    try {
        status = work(path);
    } catch (const std::exception &error) {
        std::printf("%s\n", error.what());
    }
    std::filesystem::remove(path);
    return status;
}
