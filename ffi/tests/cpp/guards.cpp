// Guards of a pool's pages, as code that was written for guards of another buffer manager uses them.
#include "check.hpp"

#include <array>
#include <atomic>
#include <chrono>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>

using namespace farheap;

namespace {

struct table {
    manager limit{16 * mib};
    table_path file;
    pool pages = pool::create(limit, file.path, 64 * mib);
    std::uint64_t allocate(std::uint64_t value) {
        exclusive_guard page = pages.allocate();
        page.write(0, value);
        return page.id();
    }
};

template <class Guard> void an_empty_guard_holds_nothing() {
    Guard empty;
    CHECK(!empty.holds() && empty.data() == nullptr && empty.size() == 0);
    empty.unfix();
    Guard moved(std::move(empty));
    empty = std::move(moved);
    std::array<Guard, 3> many;
    CHECK(!many[2].holds() && !empty.holds());
    throws<error>(FARHEAP_E_HANDLE, [&] { (void)empty.template read<int>(0); });
}

// Each method but those that say that nothing is held.
template <class Guard> void refuses(Guard &ended) {
    const auto refused = [](auto call) { throws<error>(FARHEAP_E_HANDLE, call); };
    CHECK(!ended.holds() && ended.data() == nullptr && ended.size() == 0);
    ended.unfix();
    refused([&] { (void)ended.template read<int>(0); });
    if constexpr (!std::is_same_v<Guard, optimistic_guard>) refused([&] { (void)ended.lsn(); });
    if constexpr (!std::is_same_v<Guard, exclusive_guard>) refused([&] { (void)ended.try_upgrade(); });
    if constexpr (std::is_same_v<Guard, exclusive_guard>) {
        refused([&] { ended.write(0, 1); });
        refused([&] { ended.write(1 << 20, 1); });
        refused([&] { (void)ended.write(); });
        refused([&] { ended.set_lsn(1); });
        refused([&] { (void)std::move(ended).downgrade(); });
        refused([&] { std::move(ended).free(); });
    }
    if constexpr (std::is_same_v<Guard, optimistic_guard>) {
        CHECK(!ended.validate());
        refused([&] { ended.check(); });
        refused([&] { (void)ended.share_or_restart(); });
        refused([&] { (void)ended.upgrade_or_restart(); });
        refused([&] { (void)ended.upgrade(); });
        refused([&] { (void)ended.try_share(); });
    }
}

template <class Guard> void refuses_once_ended(Guard guard) {
    Guard moved(std::move(guard));
    refuses(guard);
    guard = std::move(moved);
    refuses(moved);
    CHECK(guard.holds() && guard.size() > 0 && guard.data());
    guard.unfix();
    refuses(guard);
}

void a_guard_that_has_ended_refuses_everything() {
    table t;
    const std::uint64_t id = t.allocate(1);
    refuses_once_ended(t.pages.fix_shared(id));
    refuses_once_ended(t.pages.fix_exclusive(id));
    refuses_once_ended(t.pages.fix_optimistic(id));
    exclusive_guard alone = t.pages.fix_exclusive(id);
    shared_guard kept = std::move(alone).downgrade();
    refuses(alone);
    std::optional<exclusive_guard> upgraded = kept.try_upgrade();
    refuses(kept);
    std::move(*upgraded).free();
    refuses(*upgraded);
    CHECK(t.pages.stats().holders == 0);
}

void a_value_that_was_moved_is_read_at_its_new_place_only() {
    table t;
    btree tree = btree::create(t.pages);
    tree.insert("key", "value");
    std::optional<value_guard> first = tree.get_ref("key");
    value_guard second = std::move(*first);
    CHECK(second.get() == "value" && std::string_view(second) == "value");
    throws<error>(FARHEAP_E_HANDLE, [&] { (void)first->get(); });
    throws<error>(FARHEAP_E_HANDLE, [&] { (void)std::string_view(*first); });
}

// What a child that does `what` prints before it aborts.
template <class What> std::string last_words(What what) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        what();
        _exit(0);
    }
    close(ends[1]);
    std::string words;
    char some[512];
    for (ssize_t got; (got = read(ends[0], some, sizeof some)) > 0;) words.append(some, static_cast<std::size_t>(got));
    close(ends[0]);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    return words;
}

void a_scope_that_ends_elsewhere_ends_the_process() {
    const auto complains = [](const std::string &words) {
        CHECK(words.find("farheap: a scope ends on another thread than it began on") == 0);
    };
    complains(last_words([] {
        auto moved = std::make_unique<scope>(FARHEAP_FAR);
        std::thread([&] { moved.reset(); }).join();
    }));
    complains(last_words([] {
        auto outer = std::make_unique<scope>(FARHEAP_FAR), inner = std::make_unique<scope>(FARHEAP_LOCAL);
        outer.reset();
    }));
    complains(last_words([] {
        auto moved = std::make_unique<scope>(FARHEAP_FAR);
        std::thread([&] { // In a scope of its own.
            scope own(FARHEAP_LOCAL);
            moved.reset();
        }).join();
    }));
    CHECK(farheap_scope_number() == 0);
    {
        scope outer(FARHEAP_FAR);
        const std::uint64_t number = farheap_scope_number();
        CHECK(number != 0);
        { scope inner(FARHEAP_LOCAL); }
        CHECK(farheap_scope_number() == number);
    }
    CHECK(farheap_scope_number() == 0);
}

void an_empty_guard_is_assigned_to() {
    table t;
    const std::uint64_t first = t.allocate(1), second = t.allocate(2);
    {
        shared_guard parent, node;
        node = t.pages.fix_shared(first);
        CHECK(node.holds() && node.read<std::uint64_t>(0) == 1);
        parent = std::move(node);
        node = t.pages.fix_shared(second);
        CHECK(parent.id() == first && node.id() == second && t.pages.stats().holders == 2);
        parent = shared_guard(); // Ends the fix.
        CHECK(!parent.holds() && t.pages.stats().holders == 1);
    }
    exclusive_guard changed;
    changed = t.pages.fix_exclusive(first);
    changed.write<std::uint64_t>(0, 3);
    changed = exclusive_guard();
    optimistic_guard look;
    CHECK(!look.validate() && t.pages.stats().holders == 0);
    look = t.pages.fix_optimistic(first);
    CHECK(look.holds() && look.read<std::uint64_t>(0) == 3 && look.validate());
}

void an_attempt_is_made_again_until_no_page_changed_under_it() {
    table t;
    const std::uint64_t parent = t.allocate(0), child = t.allocate(9);
    t.pages.fix_exclusive(parent).write(8, child);
    int attempts = 0;
    const std::uint64_t found = optimistically([&] {
        optimistic_guard node = t.pages.fix_optimistic(parent);
        const auto next = node.read<std::uint64_t>(8);
        node.check();
        if (++attempts == 1) t.pages.fix_exclusive(parent).write(0, 1);
        optimistic_guard leaf = t.pages.fix_optimistic(next);
        node.check();
        const auto value = leaf.read<std::uint64_t>(0);
        if (attempts == 2) t.pages.fix_exclusive(child).write(0, value + 1);
        leaf.check();
        return value;
    });
    CHECK(found == 10 && attempts == 3 && t.pages.stats().holders == 0);
    optimistically([] {}); // One that returns nothing.
    int value = 5;
    int &same = optimistically([&]() -> int & { return value; });
    CHECK(&same == &value);
}

void an_upgrade_that_fails_restarts() {
    table t;
    const std::uint64_t id = t.allocate(0);
    int attempts = 0;
    optimistically([&] {
        optimistic_guard look = t.pages.fix_optimistic(id);
        const auto value = look.read<std::uint64_t>(0);
        if (++attempts == 1) t.pages.fix_exclusive(id).write(0, value + 1);
        look.upgrade_or_restart().write(0, value + 1);
    });
    CHECK(attempts == 2 && t.pages.fix_shared(id).read<std::uint64_t>(0) == 2);
    shared_guard kept = optimistically([&] {
        optimistic_guard look = t.pages.fix_optimistic(id);
        if (++attempts == 3) t.pages.fix_exclusive(id).write(0, 7);
        return look.share_or_restart();
    });
    CHECK(attempts == 4 && kept.read<int>(0) == 7);
}

void what_else_an_attempt_throws_passes() {
    table t;
    throws<error>(FARHEAP_E_NO_SUCH_PAGE, [&] {
        optimistically([&] { return t.pages.fix_optimistic(1 << 20).read<int>(0); });
    });
    throws<error>(FARHEAP_E_HANDLE, [] { optimistically([] { optimistic_guard().check(); }); });
}

void two_threads_that_restart_lose_no_change() {
    table t;
    const std::uint64_t id = t.allocate(0);
    constexpr unsigned turns = 20000;
    const auto count = [&] {
        for (unsigned i = 0; i < turns; i++) {
            optimistically([&] {
                optimistic_guard look = t.pages.fix_optimistic(id);
                const auto value = look.read<std::uint64_t>(0);
                look.upgrade_or_restart().write(0, value + 1);
            });
        }
    };
    std::thread other(count);
    count();
    other.join();
    CHECK(t.pages.fix_shared(id).read<std::uint64_t>(0) == 2 * turns);
}

void an_upgrade_waits_for_the_holders() {
    table t;
    const std::uint64_t id = t.allocate(3);
    optimistic_guard look = t.pages.fix_optimistic(id);
    shared_guard reader = t.pages.fix_shared(id);
    CHECK(!look.try_upgrade() && look.validate());
    std::atomic<bool> gone{false};
    std::thread other([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        gone = true;
        reader.unfix();
    });
    exclusive_guard changed = look.upgrade();
    CHECK(gone && !look.holds());
    other.join();
    changed.write(0, 4);
    changed.unfix();
    int attempts = 0;
    optimistically([&] {
        optimistic_guard again = t.pages.fix_optimistic(id);
        if (++attempts == 1) t.pages.fix_exclusive(id).write(0, 5);
        again.upgrade().write(0, 6);
    });
    CHECK(attempts == 2 && t.pages.fix_shared(id).read<int>(0) == 6);
    pool_options hasty;
    hasty.deadline_ms = 5;
    table_path file;
    pool pages = pool::create(t.limit, file.path, 16 * mib, hasty);
    exclusive_guard held = pages.allocate();
    shared_guard kept = std::move(held).downgrade();
    optimistic_guard late = pages.fix_optimistic(kept.id());
    throws<error>(FARHEAP_E_LATCH_TIMEOUT, [&] { (void)late.upgrade(); });
    CHECK(late.holds() && late.validate());
}

void a_page_has_one_address() {
    table t;
    const std::uint64_t id = t.allocate(7);
    const volatile std::uint8_t *const at = t.pages.page_address(id);
    CHECK(t.pages.fix_shared(id).data() == at && t.pages.page_at(at + 4095) == id);
    t.pages.evict_all();
    optimistic_guard look = t.pages.fix_optimistic(id);
    CHECK(*t.pages.page_address(id) == 7 && look.validate());
    CHECK(!t.pages.page_address(0) && !t.pages.page_at(&t) && !t.pages.page_at(nullptr));
}

void whole_pages_are_the_programs() {
    struct node {
        std::uint64_t words[512];
    };
    static_assert(sizeof(node) == 4096);
    manager limit(16 * mib);
    table_path file;
    pool_options options;
    options.whole_pages = FARHEAP_ON;
    pool pages = pool::create(limit, file.path, 16 * mib, options);
    CHECK(pages.payload() == sizeof(node));
    exclusive_guard page = pages.allocate();
    const std::uint64_t id = page.id();
    reinterpret_cast<node *>(page.write())->words[511] = id;
    CHECK(page.lsn() == 0);
    throws<error>(FARHEAP_E_ARGUMENT, [&] { page.set_lsn(1); });
    page.unfix();
    pages.evict_all();
    CHECK(pages.fix_shared(id).read<node>(0).words[511] == id);
}

} // namespace

int main() {
    return run([] {
        an_empty_guard_holds_nothing<shared_guard>();
        an_empty_guard_holds_nothing<exclusive_guard>();
        an_empty_guard_holds_nothing<optimistic_guard>();
        a_guard_that_has_ended_refuses_everything();
        a_value_that_was_moved_is_read_at_its_new_place_only();
        a_scope_that_ends_elsewhere_ends_the_process();
        an_empty_guard_is_assigned_to();
        a_page_has_one_address();
        whole_pages_are_the_programs();
        an_attempt_is_made_again_until_no_page_changed_under_it();
        an_upgrade_that_fails_restarts();
        what_else_an_attempt_throws_passes();
        two_threads_that_restart_lose_no_change();
        an_upgrade_waits_for_the_holders();
    });
}
