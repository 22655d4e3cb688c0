// A column store whose columns live on an SSD tier, by std::pmr alone: query 6 of TPC-H under a limit
// that is a third of the data.
//
// The columns follow TPC-H's rules for `lineitem` (clause 4.2.3), with a generator of this program's
// own: the answer is compared with one that is computed while the rows are made, without far memory.
#include <farheap.hpp>

#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace {

struct row {
    std::int64_t price; // cents
    std::int32_t quantity;
    std::int32_t discount; // percent
    std::int32_t ship_date; // days since 1992-01-01
};

class generator {
public:
    row next() {
        row made{};
        made.quantity = between(1, 50);
        made.discount = between(0, 10);
        const std::int32_t part = between(1, 200'000);
        made.price = made.quantity * (90'000 + (part / 10) % 20'001 + 100 * (part % 1'000));
        made.ship_date = between(0, 2'405) + between(1, 121);
        return made;
    }

private:
    std::int32_t between(std::int32_t from, std::int32_t to) {
        state_ = state_ * 6'364'136'223'846'793'005u + 1'442'695'040'888'963'407u;
        return from + static_cast<std::int32_t>((state_ >> 33) % static_cast<std::uint64_t>(to - from + 1));
    }
    std::uint64_t state_ = 42;
};

// Query 6: shipped in 1994, discount of 5 to 7 percent, quantity below 24; in 1/10000 of a dollar.
constexpr std::int32_t year_begins = 731, year_ends = 1'096;

class line_items {
public:
    explicit line_items(std::pmr::memory_resource *tier)
        : price_(tier), quantity_(tier), discount_(tier), ship_date_(tier) {}

    void reserve(std::size_t rows) {
        price_.reserve(rows);
        quantity_.reserve(rows);
        discount_.reserve(rows);
        ship_date_.reserve(rows);
    }
    void add(const row &made) {
        price_.push_back(made.price);
        quantity_.push_back(made.quantity);
        discount_.push_back(made.discount);
        ship_date_.push_back(made.ship_date);
    }
    std::int64_t query6() const {
        std::int64_t revenue = 0;
        for (std::size_t i = 0; i < price_.size(); i++) {
            const bool chosen = ship_date_[i] >= year_begins && ship_date_[i] < year_ends &&
                                discount_[i] >= 5 && discount_[i] <= 7 && quantity_[i] < 24;
            if (chosen) revenue += price_[i] * discount_[i];
        }
        return revenue;
    }
    std::size_t bytes() const { return price_.size() * sizeof(row) / 24 * 20; }

private:
    std::pmr::vector<std::int64_t> price_;
    std::pmr::vector<std::int32_t> quantity_, discount_, ship_date_;
};

int work(std::size_t rows) {
    farheap::heap heap("far_limit:16MiB,capacity:4GiB");
    farheap::far_resource ssd;
    int status = 0;
    {
        line_items table(&ssd);
        table.reserve(rows);
        generator make;
        std::int64_t expected = 0;
        for (std::size_t i = 0; i < rows; i++) {
            const row made = make.next();
            table.add(made);
            if (made.ship_date >= year_begins && made.ship_date < year_ends && made.discount >= 5 &&
                made.discount <= 7 && made.quantity < 24) {
                expected += made.price * made.discount;
            }
        }
        const auto began = std::chrono::steady_clock::now();
        const std::int64_t revenue = table.query6();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
        const farheap::stats stats = heap.stats();
        std::printf("%zu rows, %zu MiB of columns, at most %zu MiB resident\n", rows,
                    table.bytes() >> 20, static_cast<std::size_t>(stats.resident_bytes_max >> 20));
        std::printf("query 6: %.2f in %.3f s, %zu MiB read\n", static_cast<double>(revenue) / 10'000,
                    took.count(), static_cast<std::size_t>(stats.bytes_read >> 20));
        if (revenue != expected || stats.resident_bytes_max > 16 << 20) {
            std::printf("wrong: %.2f was expected\n", static_cast<double>(expected) / 10'000);
            status = 1;
        }
    }
    heap.shutdown();
    return status;
}

} // namespace

int main(int count, char **arguments) {
    try {
        return work(count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 2'500'000);
    } catch (const farheap::error &error) {
        const bool forbidden = error.code() == FARHEAP_E_UFFD_UNAVAILABLE;
        std::printf("%s%s\n", forbidden ? "skipped: " : "", error.what());
        return forbidden ? 77 : 1;
    }
}
