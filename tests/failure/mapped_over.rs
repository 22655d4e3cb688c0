//! What the program maps over far memory (`MAP_FIXED`) is its own until it is freed, and what is
//! around it is far memory as before.
#![expect(unsafe_code, reason = "maps over far memory")]
#![expect(clippy::disallowed_methods, reason = "does what a program does to its own memory")]

use crate::common::{Dice, mem_store, region, seed};
use crate::harness::{PAGE, check_page, config, fill_page, read_word};
use farheap::ByteCount;
use farheap::region::{Install, Region};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;

const UNIT: usize = PAGE;

/// What pages hold when one of them is mapped over.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Before {
    Fresh,
    Resident,
    Stored,
}

/// Maps a file of `len` bytes over memory, and fills it; returns the file.
fn map_file_over(start: usize, len: usize, number: u64) -> std::fs::File {
    let file = tempfile::tempfile().expect("a file");
    file.set_len(len as u64).expect("room");
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
    let at = start as *mut libc::c_void;
    // SAFETY: over a part of the case's own memory.
    let mapped = unsafe { libc::mmap(at, len, access, flags, file.as_raw_fd(), 0) };
    assert_eq!(mapped, at, "{}", std::io::Error::last_os_error());
    fill(start, len, number);
    file
}

/// Stamps the pages of a range, each with another number.
fn fill(start: usize, len: usize, number: u64) {
    (0..len).step_by(UNIT).for_each(|at| fill_page(start + at, number ^ at as u64));
}

/// The program maps a file over a page between others: they are far memory as before.
#[test]
fn what_is_around_a_page_that_was_mapped_over_is_far_memory() {
    for before in [Before::Fresh, Before::Resident, Before::Stored] {
        let Some(region) = region(config(Install::Auto), mem_store(ByteCount::mib(64))) else {
            return;
        };
        let len = ByteCount::kib(64);
        let start = region.map(len).expect("there is room").cast::<u8>().as_ptr() as usize;
        let part = start + 16 * UNIT / 4 * 2 + UNIT;
        if before != Before::Fresh {
            fill(start, len.as_usize(), 5);
        }
        if before == Before::Stored {
            region.evict_all().expect("the store works");
        }
        let file = map_file_over(part, UNIT, 6);
        let expected = |at: usize| match before {
            Before::Fresh => 0,
            _ => 5 ^ (at - start) as u64,
        };
        for _ in 0..3 {
            for at in (start..start + len.as_usize()).step_by(UNIT).filter(|at| *at != part) {
                assert_eq!(read_word(at), expected(at), "{before:?}, {at:#x}");
            }
            check_page(part, 6, 0);
            region.evict_all().expect("the store works");
        }
        let mut content = [0; 8];
        file.read_exact_at(&mut content, 0).expect("it is as long");
        assert_eq!(u64::from_ne_bytes(content), 6, "{before:?}: the file is the program's");
    }
}

/// A page, over which the program has mapped a file, is given up and is another's next, while the page beside it
/// stays in use: it is far memory again, and nobody writes to the file.
#[test]
fn a_page_that_was_mapped_over_is_far_memory_for_the_next() {
    let config = config(Install::Auto);
    let Some(region) = region(config, mem_store(ByteCount::mib(64))) else { return };
    let unit = ByteCount(UNIT as u64);
    for evicted in [false, true] {
        let both = region.map(ByteCount(2 * unit.0)).expect("there is room").cast::<u8>();
        let (first, second) = (both.as_ptr() as usize, both.as_ptr() as usize + UNIT);
        fill(first, 2 * UNIT, 5);
        if evicted {
            region.evict_all().expect("the store works");
        }
        let file = map_file_over(first, UNIT, 6);
        // SAFETY: mapped by this case, which is done with the part.
        unsafe { region.unmap(NonNull::slice_from_raw_parts(both, unit.as_usize())) }
            .expect("just mapped");
        let next = region.map(unit).expect("there is room").cast::<u8>();
        assert_eq!(next, both, "the part comes again");
        fill_page(first, 7);
        region.evict_all().expect("the store works");
        check_page(first, 7, 0);
        assert_eq!(read_word(second), 5 ^ UNIT as u64, "the page beside it");
        let mut content = [0; 8];
        file.read_exact_at(&mut content, 0).expect("it is as long");
        assert_eq!(u64::from_ne_bytes(content), 6, "the file is the program's");
        // SAFETY: mapped by this case, which is done with both.
        unsafe { region.unmap(NonNull::slice_from_raw_parts(both, 2 * unit.as_usize())) }
            .expect("just mapped");
    }
}

/// Pages are mapped over, the evictor gives them up, and then one of them is given up by its owner: its next owner has
/// far memory.
#[test]
fn a_page_that_was_given_up_is_far_memory_for_the_next() {
    let Some(region) = region(config(Install::Auto), mem_store(ByteCount::mib(64))) else {
        return;
    };
    let (unit, pages) = (ByteCount(UNIT as u64), ByteCount::kib(16));
    let start = region.map(pages).expect("there is room").cast::<u8>();
    let addr = start.as_ptr() as usize;
    fill(addr, pages.as_usize(), 5);
    let file = map_file_over(addr, pages.as_usize(), 6);
    region.evict_all().expect("the store works");
    // SAFETY: mapped by this case, which is done with the part.
    unsafe { region.unmap(NonNull::slice_from_raw_parts(start, unit.as_usize())) }
        .expect("just mapped");
    let next = region.map(unit).expect("there is room").cast::<u8>();
    assert_eq!(next, start, "the part comes again");
    for stamp in [7, 8] {
        fill_page(addr, stamp);
        region.evict_all().expect("the store works");
        check_page(addr, stamp, 0);
    }
    let mut content = [0; 8];
    file.read_exact_at(&mut content, 0).expect("it is as long");
    assert_eq!(u64::from_ne_bytes(content), 6, "the file is the program's");
    assert_eq!(read_word(addr + UNIT), 6 ^ UNIT as u64, "the rest is the file's");
    // SAFETY: mapped by this case, which is done with it.
    unsafe { region.unmap(NonNull::slice_from_raw_parts(start, pages.as_usize())) }
        .expect("just mapped");
}

/// What one page of an allocation holds.
#[derive(Debug, Default)]
enum Unit {
    #[default]
    Zero,
    Far(u64),
    /// The program's, at this offset of this file.
    File(std::rc::Rc<File>, u64, u64),
}

/// A model of what threads do to their own allocations in one region.
struct Model<'a> {
    region: &'a Region,
    dice: Dice,
    allocations: Vec<(usize, Vec<Unit>)>,
    stamps: u64,
}

impl Model<'_> {
    fn allocate(&mut self) {
        if self.allocations.len() > 16 {
            return;
        }
        let units = 1 + self.dice.below(40);
        let Ok(start) = self.region.map(ByteCount(units * UNIT as u64)) else { return };
        let units = (0..units).map(|_| Unit::Zero).collect();
        self.allocations.push((start.addr().get(), units));
    }

    /// Units `[first, end)` of an allocation, by chance.
    fn part(&mut self) -> Option<(usize, usize, usize)> {
        let at = self.dice.below(self.allocations.len().max(1) as u64) as usize;
        let len = self.allocations.get(at)?.1.len() as u64;
        let first = self.dice.below(len);
        let end = first + 1 + self.dice.below(len - first);
        Some((at, first as usize, end as usize))
    }

    fn write(&mut self) -> Option<()> {
        let (at, first, end) = self.part()?;
        let (start, units) = &mut self.allocations[at];
        for (index, unit) in units.iter_mut().enumerate().take(end).skip(first) {
            self.stamps += 1;
            fill_page(*start + index * UNIT, self.stamps);
            match unit {
                Unit::File(_, _, stamp) => *stamp = self.stamps,
                _ => *unit = Unit::Far(self.stamps),
            }
        }
        Some(())
    }

    fn map_over(&mut self) -> Option<()> {
        let (at, first, end) = self.part()?;
        let (start, units) = &mut self.allocations[at];
        self.stamps += 1;
        let file = map_file_over(*start + first * UNIT, (end - first) * UNIT, self.stamps);
        let file = std::rc::Rc::new(file);
        for (index, unit) in units[first..end].iter_mut().enumerate() {
            let offset = (index * UNIT) as u64;
            *unit = Unit::File(std::rc::Rc::clone(&file), offset, self.stamps ^ offset);
        }
        Some(())
    }

    /// Frees the end of an allocation, or all of it.
    fn free(&mut self) -> Option<()> {
        let (at, first, _) = self.part()?;
        let first = if self.dice.below(2) == 0 { 0 } else { first };
        let (start, units) = &mut self.allocations[at];
        let freed = units.split_off(first);
        let ptr = NonNull::new((*start + first * UNIT) as *mut u8).expect("not null");
        // SAFETY: this model's own, and forgotten.
        unsafe { self.region.unmap(NonNull::slice_from_raw_parts(ptr, freed.len() * UNIT)) }
            .expect("mapped");
        if units.is_empty() {
            self.allocations.swap_remove(at);
        }
        for unit in freed {
            check_file(&unit);
        }
        Some(())
    }

    fn check(&self) {
        for (start, units) in &self.allocations {
            for (index, unit) in units.iter().enumerate() {
                let addr = start + index * UNIT;
                match unit {
                    Unit::Zero => assert_eq!((read_word(addr), read_word(addr + 4088)), (0, 0)),
                    Unit::Far(stamp) | Unit::File(_, _, stamp) => check_page(addr, *stamp, index),
                }
                check_file(unit);
            }
        }
    }
}

/// Nobody else has written to the program's file.
fn check_file(unit: &Unit) {
    if let Unit::File(file, offset, stamp) = unit {
        let mut content = [0; 8];
        file.read_exact_at(&mut content, *offset).expect("it is as long");
        assert_eq!(u64::from_ne_bytes(content), *stamp, "the program's file");
    }
}

/// Threads allocate, write, map files over parts, evict, and free in parts: memory holds what its owner wrote,
/// and so do the files. `FARHEAP_STEPS` for more steps.
#[test]
fn what_is_mapped_over_and_freed_by_chance_is_never_anothers() {
    let steps = std::env::var("FARHEAP_STEPS").ok().and_then(|text| text.parse().ok());
    let seed = seed("what_is_mapped_over_and_freed_by_chance_is_never_anothers");
    for round in 0..2 {
        let config = config(Install::Auto).limit(ByteCount::mib(16));
        let Some(region) = region(config, mem_store(ByteCount::mib(256))) else { return };
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let region = &region;
                scope.spawn(move || {
                    let dice = Dice::new(seed ^ round ^ thread << 32);
                    let mut model =
                        Model { region, dice, allocations: Vec::new(), stamps: thread << 40 };
                    for _ in 0..steps.unwrap_or(300) {
                        match model.dice.below(16) {
                            0..=4 => model.allocate(),
                            5..=9 => drop(model.write()),
                            10 => drop(model.map_over()),
                            11..=13 => drop(model.free()),
                            14 => model.check(),
                            _ => region.evict_all().expect("the store works"),
                        }
                    }
                    model.check();
                    while !model.allocations.is_empty() {
                        model.free();
                    }
                });
            }
        });
    }
}
