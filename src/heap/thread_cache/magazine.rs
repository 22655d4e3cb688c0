//! Magazines: a thread's freed far objects by size class, ready for its next allocation.
//!
//! In front of jemalloc's explicit cache, which costs twice what its automatic one does for small
//! sizes, and does not serve sizes above 32 KiB at all: there a pair of allocate and free takes
//! the arena's locks, half a microsecond. Those sizes have magazines of their own (`large`), for
//! local memory too. Used by `thread_cache`.
//!
//! jemalloc has no classes above 32 KiB since 5.3.1, it rounds to pages (and its own caches end
//! there, whatever `tcache_max` says). Here the classes go on, four to a doubling, and memory
//! is asked for in [`fitting_size`]s, so that objects of a class can replace each other. What the
//! rounding adds at the end of a fresh block is not touched, and so costs capacity but no frame.
//!
//! # Invariants
//! 1. Every object in stack `c` has the size of class `c`: up to [`SMALL_MAX`] because
//!    [`class_of`] agrees with jemalloc for every layout that it accepts, above because
//!    memory is allocated, resized and freed with its [`fitting_size`].
//! 2. Each class up to [`SMALL_MAX`] holds at most [`SMALL_CLASS_MAX`] bytes, and only what it was
//!    given room for ([`add_room`](Magazines::add_room)).

use crate::heap::tail;
use std::alloc::Layout;
use std::ptr;

/// Largest size that magazines keep, in bytes.
pub(in crate::heap) const SIZE_MAX: usize = 8 << 20;

pub(in crate::heap) use crate::heap::jemalloc::SMALL_MAX;

/// Size classes up to [`SIZE_MAX`].
pub(in crate::heap) const CLASSES: usize = class_of_size(SIZE_MAX) + 1;

/// The last class up to [`SMALL_MAX`].
pub(super) const SMALL_LAST: usize = class_of_size(SMALL_MAX);

/// Size classes up to [`SMALL_MAX`].
const SMALL_CLASSES: usize = SMALL_LAST + 1;

/// Maximum number of objects of a class: few enough for a bound in bytes, many enough to be of use.
const SMALL_DEPTH_MAX: usize = 128;
const SMALL_DEPTH_MIN: usize = 8;

/// Maximum number of bytes of one class up to [`SMALL_MAX`], unless that were less than [`SMALL_DEPTH_MIN`].
const SMALL_CLASS_MAX: usize = 64 << 10;

/// Largest alignment that magazines serve: jemalloc's page.
const ALIGN_MAX: usize = 4096;

/// The class of a layout; `None` when magazines do not serve it.
#[inline]
pub(in crate::heap) fn class_of(layout: Layout) -> Option<usize> {
    if layout.size() > SIZE_MAX || layout.align() > ALIGN_MAX {
        return None;
    }
    // jemalloc serves an alignment by the class of the size rounded up to it. The sum is small,
    // and a division would cost more than all the rest.
    let size = (layout.size() + layout.align() - 1) & !(layout.align() - 1);
    if size <= LOOKUP_MAX {
        Some(usize::from(LOOKUP[size.div_ceil(8)]))
    } else {
        (size <= SIZE_MAX).then(|| class_of_size(size))
    }
}

/// The size of a layout's objects if a class holds them: what jemalloc then says it is.
#[inline]
pub(in crate::heap) fn class_size(layout: Layout) -> Option<usize> {
    let align = layout.align().min(ALIGN_MAX);
    // Layouts are below `isize::MAX`: the sum does not overflow.
    let size = (layout.size() + align - 1) & !(align - 1);
    // Beyond a page's alignment jemalloc has only whole extents.
    let size = if layout.align() > ALIGN_MAX { size.max(EXTENT_MIN) } else { size };
    (size <= SIZE_MAX).then(|| SIZES[class_of_size(size)])
}

/// The size of a class's objects.
#[inline]
pub(in crate::heap) fn block_size(class: usize) -> usize {
    SIZES[class]
}

/// jemalloc's smallest extent of its own.
pub(in crate::heap) const EXTENT_MIN: usize = 16 << 10;

/// The size to ask jemalloc for.
#[inline]
pub(in crate::heap) fn fitting_size(layout: Layout) -> usize {
    match class_of(layout) {
        Some(class) if class > SMALL_LAST => SIZES[class],
        _ => layout.size(),
    }
}

/// Classes of small sizes, which are looked up faster than computed: by size / 8, rounded up.
const LOOKUP_MAX: usize = 1 << 10;
const LOOKUP: [u8; LOOKUP_MAX / 8 + 1] = {
    let mut classes = [0; LOOKUP_MAX / 8 + 1];
    let mut index = 0;
    while index < classes.len() {
        classes[index] = class_of_size(index * 8) as u8;
        index += 1;
    }
    classes
};

/// A class whose objects are as C asks for most of its blocks: small, aligned to 16 at most. Below
/// [`SMALL_LAST`], so that no bytes are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::heap) struct SmallClass(u8);

impl SmallClass {
    /// Every class from 16 bytes up has this alignment.
    const ALIGN_MAX: usize = 16;
    /// Bit `n` is set when `n` is such an alignment.
    const ALIGNS: usize = 1 << 1 | 1 << 2 | 1 << 4 | 1 << 8 | 1 << 16;
    /// Largest size: rounded up to any of them it can still be looked up.
    const SIZE_MAX: usize = LOOKUP_MAX - Self::ALIGN_MAX;

    /// The class of a block of `size` bytes at `align`; `None` for what is larger or nothing, for more
    /// alignment, and for what is no alignment.
    #[inline]
    pub(in crate::heap) fn of(size: usize, align: usize) -> Option<SmallClass> {
        let is_size = size.wrapping_sub(1) < Self::SIZE_MAX;
        if !is_size || align > Self::ALIGN_MAX || Self::ALIGNS >> align & 1 == 0 {
            return None;
        }
        let size = (size + align - 1) & !(align - 1);
        Some(SmallClass(LOOKUP[(size + 7) >> 3])) // Sums of small numbers: cheaper than `div_ceil`.
    }

    /// The same by its number, if it is one of these.
    #[inline]
    pub(in crate::heap) fn of_class(class: u8) -> Option<SmallClass> {
        (class <= LOOKUP[LOOKUP_MAX / 8]).then_some(SmallClass(class))
    }

    /// Bytes of its objects.
    #[inline]
    pub(in crate::heap) fn size(self) -> usize {
        SIZES[usize::from(self.0)]
    }

    #[inline]
    pub(in crate::heap) fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// The class of a size: 8, then every 16 up to 128, then four to a doubling.
#[inline]
const fn class_of_size(size: usize) -> usize {
    if size <= 8 {
        0
    } else if size <= 128 {
        size.div_ceil(16)
    } else {
        let log = (size - 1).ilog2() as usize;
        let quarter = ((size - 1) >> (log - 2)) & 3;
        9 + (log - 7) * 4 + quarter
    }
}

/// The largest size of a class.
const fn size_of_class(class: usize) -> usize {
    match class {
        0 => 8,
        1..=8 => class * 16,
        _ => {
            let (log, quarter) = (7 + (class - 9) / 4, (class - 9) % 4);
            (1 << log) + ((quarter + 1) << (log - 2))
        }
    }
}

/// Sizes of all classes.
pub(super) const SIZES: [usize; CLASSES] = {
    let mut sizes = [0; CLASSES];
    let mut class = 0;
    while class < CLASSES {
        sizes[class] = size_of_class(class);
        class += 1;
    }
    sizes
};

/// One class: a stack in its part of [`Magazines::objects`].
#[derive(Clone, Copy)]
struct Stack {
    first: u32,
    len: u32,
    /// Maximum number of entries at present.
    depth: u32,
}

/// A thread's magazines of one tier, for sizes up to [`SMALL_MAX`].
pub(in crate::heap) struct Magazines {
    stacks: [Stack; SMALL_CLASSES],
    /// Empty where small objects are left to jemalloc's own caches. The first entry and the last one are none of a class's,
    /// so that each has one before it, and a full class one behind.
    objects: Box<[*mut u8]>,
}

/// Maximum number of objects of a class.
const fn depth_of_class(class: usize) -> usize {
    let fit = SMALL_CLASS_MAX / SIZES[class];
    if fit > SMALL_DEPTH_MAX {
        SMALL_DEPTH_MAX
    } else if fit < SMALL_DEPTH_MIN {
        SMALL_DEPTH_MIN
    } else {
        fit
    }
}

/// Maximum number of objects, by class.
const DEPTHS: [u32; SMALL_CLASSES] = {
    let mut depths = [0; SMALL_CLASSES];
    let mut class = 0;
    while class < SMALL_CLASSES {
        depths[class] = depth_of_class(class) as u32;
        class += 1;
    }
    depths
};

/// The empty stacks, without room.
const EMPTY: [Stack; SMALL_CLASSES] = {
    let mut stacks = [Stack { first: 0, len: 0, depth: 0 }; SMALL_CLASSES];
    let (mut class, mut first) = (0, 0);
    while class < SMALL_CLASSES {
        stacks[class] = Stack { first, len: 0, depth: 0 };
        first += DEPTHS[class];
        class += 1;
    }
    stacks
};

/// Objects that all stacks hold together at most.
const ENTRIES: usize = (EMPTY[SMALL_LAST].first + DEPTHS[SMALL_LAST]) as usize;

impl Magazines {
    /// Empty magazines without room.
    pub(in crate::heap) fn new() -> Magazines {
        Magazines { stacks: EMPTY, objects: vec![ptr::null_mut(); ENTRIES + 2].into_boxed_slice() }
    }

    /// Magazines that never have room.
    pub(in crate::heap) fn none() -> Magazines {
        Magazines { stacks: EMPTY, objects: Box::default() }
    }

    /// Bytes of room that a class which is full gets next; `None`: it has all that it may have.
    pub(in crate::heap) fn next_room(&self, class: usize) -> Option<usize> {
        if self.objects.is_empty() {
            return None;
        }
        let depth = self.stacks[class].depth;
        // Twice as much each time, so that a class that is used little takes little.
        let more = depth.max(SMALL_DEPTH_MIN as u32).min(DEPTHS[class] - depth);
        (more > 0).then(|| more as usize * SIZES[class])
    }

    /// Gives a class the room that it [gets next](Self::next_room).
    pub(in crate::heap) fn add_room(&mut self, class: usize, bytes: usize) {
        self.stacks[class].depth += (bytes / SIZES[class]) as u32;
    }

    // `get` instead of an index: the way out of a panic would cost the callers registers to save.

    /// Takes an object of `class`, the last one put, if it is aligned to `align`.
    #[inline]
    pub(in crate::heap) fn take(&mut self, class: usize, align: usize) -> Option<*mut u8> {
        let stack = &mut self.stacks[class];
        let len = stack.len.checked_sub(1)?;
        let object = *self.objects.get((stack.first + stack.len) as usize)?;
        if object.addr() & (align - 1) != 0 {
            return None; // Possible with `cache_oblivious`, which moves large objects off page borders.
        }
        stack.len = len;
        Some(object)
    }

    /// Keeps a freed object of `class`; `false` when there is no room.
    #[inline]
    pub(in crate::heap) fn put(&mut self, class: usize, object: *mut u8) -> bool {
        let stack = &mut self.stacks[class];
        let at = (stack.first + stack.len) as usize;
        let Some([top, place]) = self.objects.get_mut(at..at + 2) else { return false };
        // The line is about to be written. Where the class is empty, it is what a neighbour has or has had.
        if *top == object && stack.len > 0 {
            tail::freed_twice(object);
        }
        if stack.len >= stack.depth {
            return false;
        }
        *place = object;
        stack.len += 1;
        true
    }

    /// As [`take`](Self::take), of an object that has the alignment.
    #[inline]
    pub(in crate::heap) fn take_small(&mut self, class: SmallClass) -> Option<*mut u8> {
        self.take(class.index(), 1)
    }

    /// As [`put`](Self::put).
    #[inline]
    pub(in crate::heap) fn put_small(&mut self, class: SmallClass, object: *mut u8) -> bool {
        self.put(class.index(), object)
    }

    /// Empties all magazines into `free`, which gets each object with its class's size, and takes
    /// their room. An object that is there twice was freed twice, and ends the process.
    pub(in crate::heap) fn drain(&mut self, mut free: impl FnMut(*mut u8, usize)) {
        let stacks = self.stacks.iter().zip(&SIZES);
        for (stack, &size) in stacks.filter(|(stack, _)| stack.len > 0) {
            let (first, len) = (stack.first as usize, stack.len as usize);
            let objects = &mut self.objects[1 + first..][..len];
            expect_each_once(objects);
            objects.iter().for_each(|&object| free(object, size));
        }
        self.stacks = EMPTY;
    }
}

/// Ends the process if a block is among these twice; sorts them.
pub(super) fn expect_each_once(blocks: &mut [*mut u8]) {
    blocks.sort_unstable();
    if let Some(twice) = blocks.windows(2).find(|pair| pair[0] == pair[1]) {
        tail::freed_twice(twice[0]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::jemalloc::{self, Flags};

    /// Keeps an object, with as much room as there may be.
    fn put(magazines: &mut Magazines, class: usize, object: *mut u8) -> bool {
        while !magazines.put(class, object) {
            let Some(bytes) = magazines.next_room(class) else { return false };
            magazines.add_room(class, bytes);
        }
        true
    }

    #[test]
    fn classes_agree_with_jemalloc_for_every_size_and_alignment() {
        for align in (0..=12).map(|log| 1_usize << log) {
            for size in (1..=16 << 10).chain((16 << 10..=SIZE_MAX).step_by(509)) {
                let layout = Layout::from_size_align(size, align).expect("a valid layout");
                let Some(class) = class_of(layout) else { continue };
                let asked = fitting_size(layout);
                let usable = jemalloc::usable_size(asked, Flags::LOCAL.aligned(asked, align));
                assert_eq!(SIZES[class], usable, "{layout:?}");
            }
        }
    }

    #[test]
    fn small_classes_are_those_of_the_layouts() {
        for size in 0..=LOOKUP_MAX + 9 {
            for align in 0..40 {
                let found = SmallClass::of(size, align).map(|class| (class.index(), class.size()));
                let expected = Layout::from_size_align(size, align)
                    .ok()
                    .filter(|layout| (1..=SmallClass::SIZE_MAX).contains(&layout.size()))
                    .filter(|layout| layout.align() <= SmallClass::ALIGN_MAX)
                    .map(|layout| (class_of(layout), class_size(layout)));
                let expected = expected.map(|(class, size)| {
                    (class.expect("small layouts have classes"), size.expect("and their sizes"))
                });
                assert_eq!(found, expected, "{size} bytes at {align}");
            }
        }
    }

    #[test]
    fn the_last_object_put_is_the_first_taken() {
        let mut magazines = Magazines::new();
        let objects = [16, 32, 48].map(ptr::without_provenance_mut);
        assert!(objects.iter().all(|&object| put(&mut magazines, 3, object)));
        assert_eq!(magazines.take(3, 8), Some(objects[2]));
        assert_eq!(magazines.take(3, 8), Some(objects[1]));
        assert_eq!(magazines.take(4, 8), None);
    }

    #[test]
    fn room_is_given_in_steps_up_to_the_bounds_and_taken_when_drained() {
        let mut magazines = Magazines::new();
        let mut objects = (1..).map(|page| ptr::without_provenance_mut(page << 12));
        let object = objects.next().expect("there are many");
        assert!(!magazines.put(3, object), "there is no room yet");
        let mut taken = 0;
        for class in 0..SMALL_CLASSES {
            let objects =
                objects.by_ref().take_while(|object| magazines.put(class, *object)).count();
            assert_eq!(objects, 0, "class {class} has no room yet");
        }
        for class in (0..SMALL_CLASSES).rev() {
            while let Some(bytes) = magazines.next_room(class) {
                assert!(bytes > 0);
                magazines.add_room(class, bytes);
                taken += bytes;
                while magazines.put(class, objects.next().expect("there are many")) {}
            }
        }
        let mut held = 0;
        magazines.drain(|_, size| held += size);
        assert!(held <= taken, "{held} bytes in room for {taken}");
        assert!(!magazines.put(3, object) && !magazines.put(SMALL_LAST, object));
    }

    #[test]
    fn magazines_for_nothing_never_have_room() {
        let magazines = Magazines::none();
        assert!((0..SMALL_CLASSES).all(|class| magazines.next_room(class).is_none()));
    }

    #[test]
    fn what_a_class_has_left_behind_in_its_neighbours_place_is_no_block_freed_twice() {
        let mut magazines = Magazines::new();
        let object = ptr::without_provenance_mut(4096);
        let last = (1..=DEPTHS[3] as usize).map(|page| ptr::without_provenance_mut(page << 12));
        last.rev().for_each(|object| assert!(put(&mut magazines, 3, object)));
        assert_eq!(magazines.take(3, 8), Some(object), "from the last place of the class");
        assert!(put(&mut magazines, 4, object), "the slab is of another class now");
    }

    #[test]
    fn draining_returns_each_object_once_with_its_size() {
        let mut magazines = Magazines::new();
        let object = ptr::without_provenance_mut(4096);
        assert!(put(&mut magazines, class_of_size(100), object));
        assert!(put(&mut magazines, class_of_size(10_000), object));
        let mut drained = Vec::new();
        magazines.drain(|object, size| drained.push((object, size)));
        assert_eq!(drained, [(object, 112), (object, 10 << 10)]);
        magazines.drain(|_, _| panic!("nothing is left"));
    }
}
