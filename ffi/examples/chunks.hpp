// A column store in chunks, as Hyrise has them: each column of a chunk is a segment, whose memory comes from a
// memory resource. A segment migrates by being copied with another resource; one atomic switch makes the copy current,
// and the old one is freed by the last query that still reads it. A plug-in decides what migrates.
#pragma once

#include <farheap.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace chunks {

using resource = std::pmr::memory_resource;

// Rows of a column in one chunk. Does not change any more: queries share it.
class segment {
public:
    explicit segment(resource *in) : in_(in) {}
    segment(const segment &) = delete;
    virtual ~segment() = default;
    virtual std::shared_ptr<const segment> copy(resource *to) const = 0;
    virtual std::size_t bytes() const = 0;
    resource *in() const { return in_; }

private:
    resource *in_;
};

template <class T> class value_segment final : public segment {
public:
    value_segment(const std::vector<T> &rows, resource *in) : segment(in), values_(rows.begin(), rows.end(), in) {}
    value_segment(const value_segment &of, resource *in) : segment(in), values_(of.values_, in) {}
    std::shared_ptr<const segment> copy(resource *to) const override {
        return std::make_shared<value_segment>(*this, to);
    }
    std::size_t bytes() const override { return values_.size() * sizeof(T); }
    const T &operator[](std::size_t row) const { return values_[row]; }

private:
    std::pmr::vector<T> values_;
};

// Few different words: their numbers, in the order of the words.
class word_segment final : public segment {
public:
    word_segment(const std::vector<std::string_view> &rows, resource *in) : segment(in), words_(in), codes_(in) {
        const std::set<std::string_view> words(rows.begin(), rows.end());
        words_.assign(words.begin(), words.end());
        codes_.reserve(rows.size());
        for (std::string_view row : rows) codes_.push_back(static_cast<std::uint8_t>(code_of(row)));
    }
    word_segment(const word_segment &of, resource *in) : segment(in), words_(of.words_, in), codes_(of.codes_, in) {}
    std::shared_ptr<const segment> copy(resource *to) const override {
        return std::make_shared<word_segment>(*this, to);
    }
    std::size_t bytes() const override { return codes_.size() + words_.size() * sizeof(std::pmr::string); }
    std::uint8_t code(std::size_t row) const { return codes_[row]; }
    const std::pmr::string &word(std::uint8_t code) const { return words_[code]; }
    // The number of a word; -1 when no row has it.
    int code_of(std::string_view word) const {
        const auto at = std::lower_bound(words_.begin(), words_.end(), word);
        return at != words_.end() && *at == word ? static_cast<int>(at - words_.begin()) : -1;
    }

private:
    std::pmr::vector<std::pmr::string> words_;
    std::pmr::vector<std::uint8_t> codes_;
};

// Where a chunk keeps a column. Reading and migrating need no lock.
class slot {
public:
    explicit slot(std::shared_ptr<const segment> first) : current_(std::move(first)) {}

    // The segment, for as long as the caller keeps it. The caller knows the column's type.
    template <class Segment> std::shared_ptr<const Segment> read() const {
        reads_.fetch_add(1, std::memory_order_relaxed);
        return std::static_pointer_cast<const Segment>(peek());
    }
    std::shared_ptr<const segment> peek() const { return std::atomic_load(&current_); }
    std::uint64_t reads() const { return reads_.load(std::memory_order_relaxed); }

    // Copies the segment to a resource; false if it is there, or another thread was first.
    bool migrate(resource *to) {
        std::shared_ptr<const segment> old = peek();
        return old->in() != to && std::atomic_compare_exchange_strong(&current_, &old, old->copy(to));
    }

private:
    std::shared_ptr<const segment> current_;
    mutable std::atomic<std::uint64_t> reads_{0};
};

class chunk {
public:
    template <class T> void add(const std::vector<T> &rows, resource *in) {
        using made = std::conditional_t<std::is_same_v<T, std::string_view>, word_segment, value_segment<T>>;
        slots_.push_back(std::make_unique<slot>(std::make_shared<made>(rows, in)));
        rows_ = rows.size();
    }
    template <class T> auto values(std::size_t column) const { return slots_[column]->read<value_segment<T>>(); }
    auto words(std::size_t column) const { return slots_[column]->read<word_segment>(); }
    std::size_t rows() const { return rows_; }
    const std::vector<std::unique_ptr<slot>> &slots() const { return slots_; }

private:
    std::vector<std::unique_ptr<slot>> slots_;
    std::size_t rows_ = 0;
};

using table = std::vector<chunk>;
using database = std::map<std::string, table>;

inline std::vector<slot *> all_slots(const database &of) {
    std::vector<slot *> all;
    for (const auto &[name, chunks] : of) {
        for (const chunk &one : chunks) {
            for (const auto &column : one.slots()) all.push_back(column.get());
        }
    }
    return all;
}

// What extends a database while it runs.
class plugin {
public:
    virtual ~plugin() = default;
    virtual void start() = 0;
    virtual void stop() = 0;
};

struct tier {
    std::string name;
    resource *in;
    std::size_t room; // Bytes of segments that may be in it.
};

// Puts segments into the fastest tier that has room for them: those first that are read most often for their size.
class tiering_plugin final : public plugin {
public:
    // The last tier has room for all.
    tiering_plugin(const database &of, std::vector<tier> fastest_first, std::chrono::milliseconds every)
        : tiers_(std::move(fastest_first)), every_(every) {
        for (slot *one : all_slots(of)) {
            uses_.push_back({one, one->reads(), 0, one->peek()->bytes(), tiers_.size() - 1});
        }
    }
    ~tiering_plugin() override { stop(); }

    void start() override {
        worker_ = std::thread([this] {
            std::unique_lock<std::mutex> lock(mutex_);
            while (!is_stopping_) {
                decide();
                wake_.wait_for(lock, every_, [this] { return is_stopping_; });
            }
            decide(); // By all that was read.
        });
    }
    void stop() override {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            is_stopping_ = true;
        }
        wake_.notify_all();
        if (worker_.joinable()) worker_.join();
    }
    // After stop().
    std::uint64_t migrated() const { return migrated_; }

private:
    struct use {
        slot *of;
        std::uint64_t reads_before;
        double recent; // Reads; what was read some decisions ago counts less and less.
        std::size_t bytes;
        std::size_t tier;
    };

    void decide() {
        for (use &one : uses_) {
            const std::uint64_t reads = one.of->reads();
            one.recent += static_cast<double>(reads - one.reads_before) - one.recent / 16;
            one.reads_before = reads;
        }
        // Another takes a place only if it is read twice as often: a migration costs a copy.
        const auto per_byte = [&](const use &one) {
            return one.recent / static_cast<double>(one.bytes) * (one.tier + 1 < tiers_.size() ? 2 : 1);
        };
        std::stable_sort(uses_.begin(), uses_.end(), [&](auto &a, auto &b) { return per_byte(a) > per_byte(b); });
        std::vector<std::size_t> used(tiers_.size());
        for (use &one : uses_) {
            one.tier = 0;
            while (one.tier + 1 < tiers_.size() && used[one.tier] + one.bytes > tiers_[one.tier].room) one.tier++;
            used[one.tier] += one.bytes;
        }
        // The slowest tier first: what leaves a tier makes room in it.
        for (std::size_t to = tiers_.size(); to-- > 0;) {
            for (const use &one : uses_) {
                if (one.tier == to) migrated_ += one.of->migrate(tiers_[to].in);
            }
        }
    }

    std::vector<use> uses_;
    std::vector<tier> tiers_;
    std::chrono::milliseconds every_;
    std::thread worker_;
    std::mutex mutex_;
    std::condition_variable wake_;
    bool is_stopping_ = false;
    std::uint64_t migrated_ = 0;
};

} // namespace chunks
