// Guards of a pool's pages, as code that was written for guards of another buffer manager uses them.
#include "check.hpp"

#include <array>
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

} // namespace

int main() {
    return run([] {
        an_empty_guard_holds_nothing<shared_guard>();
        an_empty_guard_holds_nothing<exclusive_guard>();
        an_empty_guard_holds_nothing<optimistic_guard>();
        an_empty_guard_is_assigned_to();
        a_page_has_one_address();
    });
}
