// A B+-tree written against the collective interface: it compiles with farheap::collective_allocator,
// where it chooses the place of each node, and with std::allocator, where there is one place.
#ifndef EXAMPLE_BTREE_HPP
#define EXAMPLE_BTREE_HPP

#include <farheap.hpp>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

template <class Key, class Value, class Allocator> class btree {
    static constexpr std::size_t fan_out = 16;

    struct node {
        std::size_t count = 0; // keys
        bool is_leaf = true;
        Key keys[fan_out] = {};
        Value values[fan_out] = {};        // of a leaf
        node *children[fan_out + 1] = {};  // of an inner node; a leaf's first is the next leaf
    };

    using node_allocator = typename std::allocator_traits<Allocator>::template rebind_alloc<node>;
    using traits = farheap::collective_traits<node_allocator>;
    using suballocator = typename traits::suballocator_type;

public:
    explicit btree(const Allocator &of) : allocator_(of) {}
    btree(const btree &) = delete;
    btree &operator=(const btree &) = delete;
    ~btree() { drop(root_); }

    std::size_t size() const { return size_; }

    const Value *find(const Key &key) const {
        const node *at = root_;
        while (at && !at->is_leaf) at = at->children[child_of(at, key)];
        if (!at) return nullptr;
        const std::size_t index = first_not_below(at, key);
        return index < at->count && at->keys[index] == key ? &at->values[index] : nullptr;
    }

    void insert(const Key &key, const Value &value) {
        if (!root_) root_ = make(nullptr, true);
        if (root_->count == fan_out) {
            node *grown = make(nullptr, false);
            grown->children[0] = root_;
            root_ = grown;
            split(grown, 0);
        }
        node *at = root_;
        while (!at->is_leaf) {
            std::size_t index = child_of(at, key);
            if (at->children[index]->count == fan_out) {
                split(at, index);
                index = child_of(at, key);
            }
            at = at->children[index];
        }
        const std::size_t index = first_not_below(at, key);
        if (index < at->count && at->keys[index] == key) {
            at->values[index] = value;
            return;
        }
        std::move_backward(at->keys + index, at->keys + at->count, at->keys + at->count + 1);
        std::move_backward(at->values + index, at->values + at->count, at->values + at->count + 1);
        at->keys[index] = key;
        at->values[index] = value;
        at->count++;
        size_++;
    }

    // Calls `each(key, value)` for up to `count` pairs from `from` on, in order.
    template <class Each> void scan(const Key &from, std::size_t count, Each each) const {
        const node *at = root_;
        while (at && !at->is_leaf) at = at->children[child_of(at, from)];
        std::size_t index = at ? first_not_below(at, from) : 0;
        for (; at && count > 0; at = at->children[0], index = 0) {
            for (; index < at->count && count > 0; index++, count--) {
                each(at->keys[index], at->values[index]);
            }
        }
    }

    // Moves the nodes outside of local memory into pages in the order of a depth-first walk, and
    // leaves a part of each page free for nodes to come.
    void make_page_aware(double fill = 0.7) {
        suballocator page = traits::get_suballocator(allocator_, farheap::new_per_page);
        node *previous_leaf = nullptr;
        if (root_) root_ = rearrange(root_, page, fill, previous_leaf);
    }

    // How many of the links from parent to child stay within a place of their own.
    template <class Same> std::pair<std::size_t, std::size_t> links(Same same) const {
        std::pair<std::size_t, std::size_t> found{0, 0};
        if (root_) count_links(root_, same, found);
        return found;
    }

private:
    static std::size_t first_not_below(const node *at, const Key &key) {
        return static_cast<std::size_t>(std::lower_bound(at->keys, at->keys + at->count, key) - at->keys);
    }
    static std::size_t child_of(const node *at, const Key &key) {
        return static_cast<std::size_t>(std::upper_bound(at->keys, at->keys + at->count, key) - at->keys);
    }

    // Inner nodes go to local memory while it lasts; a leaf to where its sibling is, if there is room.
    node *make(const node *sibling, bool is_leaf) {
        node *place = nullptr;
        if (!is_leaf) {
            suballocator local = traits::get_suballocator(allocator_, farheap::purely_local);
            place = local.try_allocate(1);
        } else if (sibling) {
            suballocator same = traits::get_suballocator(allocator_, static_cast<const void *>(sibling));
            place = same.try_allocate(1);
        }
        if (!place) {
            suballocator rest = traits::get_suballocator(allocator_, farheap::swappable_plain);
            place = rest.allocate(1);
        }
        std::allocator_traits<node_allocator>::construct(allocator_, place);
        place->is_leaf = is_leaf;
        return place;
    }

    void split(node *parent, std::size_t index) {
        node *left = parent->children[index];
        node *right = make(left, left->is_leaf);
        const std::size_t half = left->count / 2;
        const Key separator = left->keys[half];
        // An inner node gives its middle key to the parent; a leaf keeps it.
        const std::size_t from = left->is_leaf ? half : half + 1;
        right->count = left->count - from;
        std::move(left->keys + from, left->keys + left->count, right->keys);
        if (left->is_leaf) {
            std::move(left->values + from, left->values + left->count, right->values);
            right->children[0] = left->children[0];
            left->children[0] = right;
        } else {
            std::move(left->children + from, left->children + left->count + 1, right->children);
        }
        left->count = half;
        std::move_backward(parent->keys + index, parent->keys + parent->count,
                           parent->keys + parent->count + 1);
        std::move_backward(parent->children + index + 1, parent->children + parent->count + 1,
                           parent->children + parent->count + 2);
        parent->keys[index] = separator;
        parent->children[index + 1] = right;
        parent->count++;
    }

    node *rearrange(node *at, suballocator &page, double fill, node *&previous_leaf) {
        if (!at->is_leaf) {
            for (std::size_t i = 0; i <= at->count; i++) {
                at->children[i] = rearrange(at->children[i], page, fill, previous_leaf);
            }
        }
        node *moved = at;
        suballocator local = traits::get_suballocator(allocator_, farheap::purely_local);
        // With an ordinary allocator everything is in its one place already.
        if (!local.contains(at)) {
            if (!page.is_occupancy_under(fill)) {
                page = traits::get_suballocator(allocator_, farheap::new_per_page);
            }
            moved = traits::relocate(allocator_, page, at);
            if (!moved) {
                page = traits::get_suballocator(allocator_, farheap::new_per_page);
                moved = traits::relocate(allocator_, page, at);
            }
            if (!moved) throw std::bad_alloc();
        }
        if (moved->is_leaf) {
            if (previous_leaf) previous_leaf->children[0] = moved;
            previous_leaf = moved;
        }
        return moved;
    }

    template <class Same>
    static void count_links(const node *at, Same same, std::pair<std::size_t, std::size_t> &found) {
        if (at->is_leaf) return;
        for (std::size_t i = 0; i <= at->count; i++) {
            const node *child = at->children[i];
            // A leaf's neighbour is what a scan goes to next.
            const node *next = child->is_leaf ? child->children[0] : child;
            if (next) {
                found.first += same(child->is_leaf ? child : at, next);
                found.second++;
            }
            count_links(child, same, found);
        }
    }

    void drop(node *at) {
        if (!at) return;
        if (!at->is_leaf) {
            for (std::size_t i = 0; i <= at->count; i++) drop(at->children[i]);
        }
        std::allocator_traits<node_allocator>::destroy(allocator_, at);
        traits::deallocate(allocator_, at, 1);
    }

    node_allocator allocator_;
    node *root_ = nullptr;
    std::size_t size_ = 0;
};

#endif
