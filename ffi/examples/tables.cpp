// A small storage engine on the pool: customers and orders in two files under one limit, each with a B+-tree,
// a log that is asked before a page is written, a checkpoint, a query with temporary memory, a second start.
#include <farheap.hpp>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <thread>

namespace {

constexpr std::uint64_t limit = 16 << 20, capacity = 64 << 20;
constexpr std::uint32_t customers = 20'000, orders = 200'000;

struct order {
    std::uint32_t customer;
    std::uint32_t cents;
};

// Big-endian: the tree's order of bytes is the numbers' order.
std::string key(std::uint32_t number) {
    std::string bytes;
    for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(number >> shift);
    return bytes;
}

template <class T> std::string bytes_of(const T &value) {
    return {reinterpret_cast<const char *>(&value), sizeof value};
}

template <class T> T value_of(std::string_view bytes) {
    T value;
    std::memcpy(&value, bytes.data(), sizeof value);
    return value;
}

// A table: its file, and the tree in it. The tree is destroyed before the pool that it is in.
struct table {
    farheap::pool pool;
    farheap::btree tree;

    // A page of the engine's own, the first that is allocated, says where the tree begins.
    static table create(farheap::manager &under, const std::string &path, farheap::pool_options options) {
        farheap::pool pool = farheap::pool::create(under, path, capacity, std::move(options));
        farheap::exclusive_guard first = pool.allocate();
        farheap::btree tree = farheap::btree::create(pool);
        first.write(0, tree.root());
        first.unfix();
        return {std::move(pool), std::move(tree)};
    }
    static table open(farheap::manager &under, const std::string &path, farheap::pool_options options) {
        farheap::pool pool = farheap::pool::open(under, path, std::move(options));
        const std::uint64_t root = pool.fix_shared(2).read<std::uint64_t>(0); // 0 and 1 are the pool's.
        farheap::btree tree = farheap::btree::open(pool, root);
        return {std::move(pool), std::move(tree)};
    }
};

// What the files must hold: each customer's sum of all orders.
bool is_right(table &customer_table, table &order_table, farheap::manager &manager) {
    farheap::temporary_resource query(manager);
    std::pmr::vector<std::uint64_t> sums(customers, 0, &query);
    std::uint32_t count = 0;
    for (farheap::entry found : order_table.tree.scan()) {
        const order read = value_of<order>(found.value);
        sums[read.customer] += read.cents;
        count++;
    }
    for (std::uint32_t n = 0; n < customers; n++) {
        const auto sum = customer_table.tree.get(key(n));
        if (!sum || value_of<std::uint64_t>(*sum) != sums[n]) return false;
    }
    return count == orders;
}

void fill(table &customer_table, table &order_table, std::atomic<std::uint64_t> &log) {
    for (std::uint32_t n = 0; n < customers; n++) {
        customer_table.tree.insert(key(n), bytes_of(std::uint64_t{0}));
    }
    const auto sell = [&](std::uint32_t from, std::uint32_t to) {
        for (std::uint32_t n = from; n < to; n++) {
            const order made{n * 7'919 % customers, n % 10'000};
            order_table.tree.insert(key(n), bytes_of(made));
            // In its page, under the page's latch: two threads may add to one customer.
            customer_table.tree.update(key(made.customer), [&](char *value, std::size_t len) {
                const std::uint64_t sum = value_of<std::uint64_t>({value, len}) + made.cents;
                std::memcpy(value, &sum, sizeof sum);
            });
            log++;
        }
    };
    std::thread other(sell, orders / 2, orders);
    sell(0, orders / 2);
    other.join();
}

int work(const std::string &dir) {
    const std::string customer_path = dir + "/customers", order_path = dir + "/orders";
    farheap::manager manager(limit);
    std::atomic<std::uint64_t> log{0};
    std::atomic<bool> log_is_full{false};
    std::uint64_t resident_max = 0;
    {
        farheap::pool_options options;
        options.before_write = [&](std::uint64_t, std::uint64_t lsn) {
            return !log_is_full && lsn <= log;
        };
        table customer_table = table::create(manager, customer_path, options);
        options.beside = &customer_table.pool; // One limit, and one order in which pages leave.
        table order_table = table::create(manager, order_path, options);
        fill(customer_table, order_table, log);

        // What goes wrong is an exception that says which file it was.
        log_is_full = true;
        try {
            order_table.pool.flush();
            return 1;
        } catch (const farheap::error &refused) {
            std::printf("%s: %.60s ...\n", refused.name(), refused.what());
            if (std::string(refused.what()).find(order_path) == std::string::npos) return 1;
        }
        log_is_full = false;
        try {
            for (;;) order_table.pool.allocate();
        } catch (const farheap::bad_alloc &full) { // No room: in memory, or in the file.
            std::printf("%s: %s\n", full.name(), full.what());
            if (std::string(full.what()).find(order_path) == std::string::npos) return 1;
        }
        // The checkpoint. Without it the changes end with the pool.
        customer_table.pool.flush();
        order_table.pool.flush();
        if (!is_right(customer_table, order_table, manager)) return 1;
        resident_max = manager.stats().used_bytes_max;
    }
    // As another process would find them, beside others that read.
    farheap::pool_options reading;
    reading.read_only = FARHEAP_ON;
    table customer_table = table::open(manager, customer_path, reading);
    reading.beside = &customer_table.pool;
    table order_table = table::open(manager, order_path, reading);
    const bool right = is_right(customer_table, order_table, manager);
    farheap::cursor newest = order_table.tree.scan_back();
    const auto last = newest.prev();
    std::printf("%s; the last order has number %02x%02x%02x%02x; %zu MiB in use of %zu at most\n",
                right ? "every sum is right" : "a sum is wrong", last->key[0] & 0xff, last->key[1] & 0xff,
                last->key[2] & 0xff, last->key[3] & 0xff, static_cast<std::size_t>(resident_max >> 20),
                static_cast<std::size_t>(limit >> 20));
    return right && last->key == key(orders - 1) && resident_max <= limit ? 0 : 1;
}

} // namespace

int main() {
    const char *tmp = std::getenv("TMPDIR");
    std::string dir = std::string(tmp ? tmp : "/tmp") + "/farheap-tables-XXXXXX";
    if (!mkdtemp(dir.data())) return 1;
    int status = 1;
    try {
        status = work(dir);
    } catch (const std::exception &error) { // farheap::error and farheap::bad_alloc are.
        std::printf("%s\n", error.what());
    }
    std::filesystem::remove_all(dir);
    return status;
}
