//! The contract of a directory: files that are written once, replaced, deleted, locked and watched.

mod common;

use common::{allocated, tier};
use farheap::{ByteCount, Far, Heap, Tier};
use farheap_tantivy::FarDirectory;
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use tantivy::directory::error::{DeleteError, LockError, OpenReadError, OpenWriteError};
use tantivy::directory::{
    Directory, INDEX_WRITER_LOCK, OwnedBytes, TerminatingWrite, WatchCallback,
};

const ROOM: ByteCount = ByteCount::mib(256);

fn path(name: &str) -> &Path {
    Path::new(name)
}

/// Bytes of which no two neighbours are alike.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8).collect()
}

fn write(directory: &FarDirectory, name: &str, data: &[u8]) {
    let mut writer = directory.open_write(path(name)).expect("a free name");
    writer.write_all(data).expect("room");
    writer.terminate().expect("room");
}

fn read(directory: &FarDirectory, name: &str) -> OwnedBytes {
    directory.open_read(path(name)).expect("the file").read_bytes().expect("its bytes")
}

#[test]
fn a_file_is_there_when_it_is_terminated() {
    let Some(tier) = tier("terminated", ROOM) else { return };
    let directory = FarDirectory::new(&tier);
    for len in [0, 1, 4096, (256 << 10) - 1, 256 << 10, (1 << 20) + 77] {
        let name = len.to_string();
        let mut writer = directory.open_write(path(&name)).expect("a free name");
        // In parts of all sizes, some larger than a block.
        pattern(len).chunks(1 + len / 3).for_each(|part| writer.write_all(part).expect("room"));
        let before = directory.open_read(path(&name));
        assert!(matches!(before, Err(OpenReadError::FileDoesNotExist(_))), "{len}");
        writer.terminate().expect("room");
        assert!(read(&directory, &name).as_slice() == pattern(len), "{len}");
        let middle = directory.open_read(path(&name)).expect("the file").slice(len / 4..len / 2);
        assert!(*middle.read_bytes().expect("bytes") == pattern(len)[len / 4..len / 2], "{len}");
    }
    let lens = [1, 4096, (256 << 10) - 1, 256 << 10, (1 << 20) + 77];
    assert_eq!(directory.file_bytes(), lens.iter().copied().map(ByteCount).sum());
}

#[test]
fn a_file_is_written_once_and_a_writer_that_gives_up_leaves_nothing() {
    let Some(tier) = tier("once", ROOM) else { return };
    let directory = FarDirectory::new(&tier);
    let mut first = directory.open_write(path("a")).expect("a free name");
    let taken = directory.open_write(path("a"));
    assert!(matches!(taken, Err(OpenWriteError::FileAlreadyExists(_))), "it is being written");
    first.write_all(&pattern(1 << 20)).expect("room");
    drop(first);
    assert!(!directory.exists(path("a")).expect("an answer"));
    write(&directory, "a", b"second");
    let taken = directory.open_write(path("a"));
    assert!(matches!(taken, Err(OpenWriteError::FileAlreadyExists(_))), "it was written");
    assert_eq!(read(&directory, "a").as_slice(), b"second");
}

#[test]
fn readers_share_far_memory_that_lives_as_long_as_the_last_of_them() {
    let Some(tier) = tier("shared", ROOM) else { return };
    let none = allocated(&tier);
    let directory = FarDirectory::new(&tier);
    write(&directory, "a", &pattern(20 << 20));
    let (first, second) = (read(&directory, "a"), read(&directory.clone(), "a"));
    assert_eq!(first.as_ptr(), second.as_ptr(), "no copies");
    assert!(Far::contains(first.as_ptr()));
    assert_eq!(Tier::of(first.as_ptr()), Some(tier.tier()));
    let last = second.slice(19 << 20..20 << 20);
    directory.delete(path("a")).expect("it is there");
    assert!(!directory.exists(path("a")).expect("an answer"));
    let missing = directory.delete(path("a"));
    assert!(matches!(missing, Err(DeleteError::FileDoesNotExist(_))));
    drop((first, second));
    assert!(last.as_slice() == &pattern(20 << 20)[19 << 20..]);
    assert!(allocated(&tier).0 >= none.0 + (20 << 20), "a reader holds it");
    drop(last);
    let left = allocated(&tier).0 - none.0;
    assert!(left < 1 << 20, "{left} bytes are left");
    let stats = tier.stats();
    assert!(stats.resident_bytes_max <= stats.limit_bytes, "{stats}");
    assert!(stats.bytes_written > ByteCount::mib(8), "the limit was at work: {stats}");
}

#[test]
fn a_replaced_file_is_seen_whole_and_old_readers_keep_theirs() {
    let Some(tier) = tier("replaced", ROOM) else { return };
    let directory = FarDirectory::new(&tier);
    let versions = [vec![1; 5000], vec![2; 300_000]];
    directory.atomic_write(path("meta.json"), &versions[0]).expect("room");
    let old = read(&directory, "meta.json");
    let is_over = AtomicBool::new(false);
    let reads = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Acquire) {
                let seen = directory.atomic_read(path("meta.json")).expect("it is always there");
                assert!(versions.contains(&seen), "{} bytes", seen.len());
                reads.fetch_add(1, Ordering::Release);
            }
        });
        for round in 0.. {
            let replaced = directory.atomic_write(path("meta.json"), &versions[round % 2]);
            replaced.expect("room");
            if reads.load(Ordering::Acquire) > 200 && round > 200 {
                break;
            }
        }
        is_over.store(true, Ordering::Release);
    });
    assert_eq!(old.as_slice(), versions[0]);
    let missing = directory.atomic_read(path("other"));
    assert!(matches!(missing, Err(OpenReadError::FileDoesNotExist(_))));
}

#[test]
fn a_lock_has_one_holder() {
    let Some(tier) = tier("locks", ROOM) else { return };
    let directory = FarDirectory::new(&tier);
    let held = directory.acquire_lock(&INDEX_WRITER_LOCK).expect("it is free");
    let second = directory.clone().acquire_lock(&INDEX_WRITER_LOCK);
    assert!(matches!(second, Err(LockError::LockBusy)));
    drop(held);
    let holders = std::thread::scope(|scope| {
        let take = || directory.acquire_lock(&INDEX_WRITER_LOCK).ok();
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(take)).collect();
        let held: Vec<_> =
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect();
        held.iter().flatten().count()
    });
    assert_eq!(holders, 1);
}

#[test]
fn who_watches_hears_of_commits_until_the_handle_is_gone() {
    let Some(tier) = tier("watched", ROOM) else { return };
    let directory = FarDirectory::new(&tier);
    let count = Arc::new(AtomicU64::new(0));
    let counting = Arc::clone(&count);
    let first = directory.watch(WatchCallback::new(move || {
        counting.fetch_add(1, Ordering::Relaxed);
    }));
    let (sender, receiver) = mpsc::channel();
    let _second = directory.watch(WatchCallback::new(move || {
        sender.send(()).expect("somebody listens");
    }));
    directory.atomic_write(path(".managed.json"), b"no commit").expect("room");
    directory.atomic_write(path("meta.json"), b"a commit").expect("room");
    receiver.recv().expect("a commit");
    assert_eq!(count.load(Ordering::Relaxed), 1, "called in order, once");
    drop(first);
    directory.atomic_write(path("meta.json"), b"another").expect("room");
    receiver.recv().expect("another commit");
    assert_eq!(count.load(Ordering::Relaxed), 1);
    assert!(receiver.try_recv().is_err());
}

/// Fills a tier until it refuses; returns what it says.
fn fill(directory: &FarDirectory) -> std::io::Error {
    let part = pattern(1 << 20);
    let mut writer = directory.open_write(path("large")).expect("a free name");
    (0..64).try_for_each(|_| writer.write_all(&part)).expect_err("no room for 64 MiB")
}

#[test]
fn memory_that_is_refused_is_an_error_of_the_writer_alone() {
    let Some(tier): Option<Heap> = tier("full", ByteCount::mib(16)) else { return };
    let directory = FarDirectory::new(&tier);
    write(&directory, "kept", &pattern(1 << 20));
    let error = fill(&directory);
    assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
    assert!(error.to_string().contains("`full`"), "{error}");
    assert!(!directory.exists(path("large")).expect("an answer"));
    assert!(read(&directory, "kept").as_slice() == pattern(1 << 20));
    // What the failed writer had is free again.
    write(&directory, "next", &pattern(6 << 20));
    assert!(read(&directory, "next").as_slice() == pattern(6 << 20));
}
