//! Devices that cannot be used, fill up, lose data: an error or a documented SIGBUS with a
//! message, never a hang, never other bytes than were written.

#![expect(unsafe_code, reason = "sees words as bytes")]

mod common;

use allocator_api2::vec::Vec as FarVec;
use common::child::{Ended, alone, case, run};
use common::place::{LoopDevice, Tmpfs};
use common::{eventually, heap, is_root};
use farheap::{Config, Error, Far, Heap};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;

const MIB: usize = 1 << 20;
const PAGE_WORDS: usize = (64 << 10) / 8;

fn start(conf: &str) -> farheap::Result<Heap> {
    Heap::start(Config::parse(conf).expect("known keys"))
}

/// Allocates and writes; `Err` when there is no memory.
fn numbers(words: usize, seed: u64) -> Result<FarVec<u64, Far>, ()> {
    let mut numbers = FarVec::new_in(Far);
    numbers.try_reserve_exact(words).map_err(drop)?;
    numbers.extend((0..words as u64).map(|n| number(n, seed)));
    Ok(numbers)
}

fn number(n: u64, seed: u64) -> u64 {
    (n ^ seed << 40).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1
}

fn assert_numbers(numbers: &[u64], seed: u64) {
    let wrong = numbers.iter().zip(0..).find(|(seen, n)| **seen != number(*n, seed));
    assert_eq!(wrong, None, "seed {seed}");
}

fn sparse(path: &Path, len: u64) -> String {
    File::create(path).and_then(|file| file.set_len(len)).expect("a sparse file");
    path.to_str().expect("UTF-8").to_owned()
}

#[test]
fn devices_that_cannot_be_used_are_refused_with_path_and_reason() {
    alone("devices_that_cannot_be_used_are_refused_with_path_and_reason", || {
        let dir = tempfile::tempdir().expect("a directory");
        let small = sparse(&dir.path().join("small"), 100_000);
        let below_a_page = sparse(&dir.path().join("page"), 1 << 20);
        let odd = sparse(&dir.path().join("odd"), (8 << 20) + 17);
        let missing = dir.path().join("missing").to_str().expect("UTF-8").to_owned();
        let directory = dir.path().to_str().expect("UTF-8");
        let refused = [
            (format!("device:{missing}"), &*missing, "does not exist"),
            (format!("device:{directory}"), directory, "directory"),
            (format!("device:{small}"), &small, "too small"),
            (format!("device:{odd},capacity:5000001B"), &odd, "not a multiple of 4096"),
            (format!("device:{odd},capacity:1GiB"), &odd, "too small"),
            ("device:/dev/null".to_owned(), "/dev/null", "is a character device"),
            (format!("dir:{missing}"), &missing, "does not exist"),
            (
                format!("device:{below_a_page},page:2MiB,limit:128MiB"),
                &below_a_page,
                "no page of 2.0 MiB",
            ),
        ];
        for (conf, path, reason) in refused {
            let limit = if conf.contains("limit") { "" } else { "limit:8MiB," };
            match start(&format!("{limit}{conf}")) {
                Err(error @ (Error::Device { .. } | Error::Config { .. })) => {
                    let text = error.to_string();
                    assert!(text.contains(path) && text.contains(reason), "{conf}: {text}");
                }
                Err(Error::UffdUnavailable { reasons }) => return println!("skipped: {reasons}"),
                other => panic!("{conf}: {other:?}"),
            }
        }
        // What is left over at the end of an odd file is left alone, and nothing stays locked.
        let heap = start(&format!("limit:8MiB,device:{odd}")).expect("an odd length is no error");
        drop(numbers(MIB, 1).expect("8 MiB fit"));
        heap.shutdown().expect("nothing is in use");
    });
}

#[test]
fn a_read_only_device_is_refused() {
    alone("a_read_only_device_is_refused", || {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("store");
        let text = sparse(&path, 8 << 20);
        let mode = fs::Permissions::from_mode(0o444);
        fs::set_permissions(&path, mode).expect("chmod");
        // Root may write all files, but no read-only device.
        let device = is_root().then(|| LoopDevice::attach(&path, &["--read-only"]));
        let text = match &device {
            None => text,
            Some(None) => return,
            Some(Some(device)) => device.path().to_str().expect("UTF-8").to_owned(),
        };
        let error = match start(&format!("limit:8MiB,device:{text}")) {
            Err(Error::UffdUnavailable { reasons }) => return println!("skipped: {reasons}"),
            other => other.expect_err("read-only").to_string(),
        };
        assert!(error.contains(&text), "{error}");
        assert!(error.contains("read-only") || error.contains("no permission"), "{error}");
    });
}

#[test]
fn a_device_in_use_by_another_process_is_refused() {
    let name = "a_device_in_use_by_another_process_is_refused";
    if let Some(path) = case(name) {
        let error = start(&format!("limit:8MiB,device:{path}")).expect_err("in use");
        return println!("start: {error}");
    }
    let dir = tempfile::tempdir().expect("a directory");
    let path = sparse(&dir.path().join("store"), 8 << 20);
    let file = File::open(&path).expect("the file");
    file.lock().expect("nobody else has it");
    let ended = run(name, &path, |_| ());
    ended.expect_success();
    assert!(ended.text.contains("in use"), "{}", ended.text);
}

#[test]
fn allocating_more_than_limit_and_device_hold_fails_and_the_rest_goes_on() {
    alone("allocating_more_than_limit_and_device_hold_fails_and_the_rest_goes_on", || {
        let Some(heap) = heap("limit:8MiB,capacity:16MiB") else { return };
        assert!(numbers(64 * MIB / 8, 0).is_err(), "64 MiB in 24");
        for _ in 0..3 {
            let mut kept = Vec::new();
            while let Ok(next) = numbers(MIB / 8, kept.len() as u64) {
                kept.push(next);
                assert!(kept.len() <= 24, "more than limit and device hold");
            }
            assert!(kept.len() >= 16, "only {} MiB of 24", kept.len());
            kept.iter().zip(0..).for_each(|(numbers, seed)| assert_numbers(numbers, seed));
            // Pages that have changed need no second place on the device.
            for seed in 100..103 {
                for numbers in &mut kept {
                    numbers.iter_mut().zip(0..).for_each(|(word, n)| *word = number(n, seed));
                }
                kept.iter().for_each(|numbers| assert_numbers(numbers, seed));
            }
            drop(kept);
            heap.purge();
        }
        assert_eq!(heap.stats().poisoned, 0);
    });
}

/// A file in `dir` that takes space until it is removed.
fn balloon(dir: &Path, len: usize) -> std::path::PathBuf {
    let path = dir.join("balloon");
    fs::write(&path, vec![1_u8; len]).expect("there is space");
    path
}

#[test]
fn a_device_that_was_full_for_a_while_loses_nothing() {
    let name = "a_device_that_was_full_for_a_while_loses_nothing";
    if let Some(dir) = case(name) {
        let Some(heap) = heap(&format!("limit:8MiB,capacity:64MiB,dir:{dir}")) else { return };
        let balloon = balloon(dir.as_ref(), 56 * MIB);
        let data = std::thread::scope(|scope| {
            scope.spawn(|| {
                assert!(eventually(|| heap.stats().write_errors > 0), "the device fills up");
                fs::remove_file(&balloon).expect("the balloon");
            });
            numbers(48 * MIB / 8, 3).expect("limit and device have room")
        });
        assert_numbers(&data, 3);
        let stats = heap.stats();
        println!("{stats:?}");
        assert!(stats.write_errors > 0 && stats.poisoned == 0, "{stats:?}");
        drop(data);
        heap.purge();
        drop(numbers(48 * MIB / 8, 4).expect("as before"));
        return;
    }
    let Some(tmpfs) = Tmpfs::mount("size=72m") else { return };
    let ended = run(name, tmpfs.path().to_str().expect("UTF-8"), |_| ());
    ended.expect_success();
    assert!(ended.text.contains("skipped") || ended.text.contains("ENOSPC"), "{}", ended.text);
}

/// Fails unless a child died of a documented SIGBUS.
fn assert_sigbus(ended: &Ended, cause: &str) {
    assert_eq!(ended.status.signal(), Some(libc::SIGBUS), "{}: {}", ended.status, ended.text);
    assert!(ended.text.contains("touching it is SIGBUS"), "{}", ended.text);
    assert!(ended.text.contains(cause), "{cause} is not in:\n{}", ended.text);
}

#[test]
fn a_device_that_stays_full_is_a_sigbus_with_the_cause() {
    let name = "a_device_that_stays_full_is_a_sigbus_with_the_cause";
    if let Some(place) = case(name) {
        let Some(_heap) = heap(&format!("limit:8MiB,capacity:128MiB,{place}")) else { return };
        let data = numbers(64 * MIB / 8, 5);
        assert!(data.is_err(), "64 MiB in 8 MiB of memory and 16 MiB of device");
        return;
    }
    let Some(tmpfs) = Tmpfs::mount("size=16m") else { return };
    let ended = run(name, &format!("dir:{}", tmpfs.path().display()), |_| ());
    if ended.show_skips() {
        return;
    }
    assert_sigbus(&ended, "ENOSPC");
    drop(tmpfs);
    let Some(tmpfs) = Tmpfs::mount("size=16m") else { return };
    let backing = tmpfs.path().join("backing");
    sparse(&backing, 128 << 20);
    let Some(device) = LoopDevice::attach(&backing, &[]) else { return };
    let ended = run(name, &format!("device:{}", device.path().display()), |_| ());
    assert_sigbus(&ended, "errno");
}

#[test]
fn allocations_fail_while_the_device_is_full() {
    let name = "allocations_fail_while_the_device_is_full";
    if let Some(dir) = case(name) {
        let Some(heap) = heap(&format!("limit:8MiB,capacity:128MiB,dir:{dir}")) else { return };
        if !heap.serves_kernel_faults() {
            return println!("skipped: only faults of user mode are permitted here");
        }
        let data = fill_by_system_calls(&heap);
        assert!(numbers(MIB / 8, 1).is_err(), "allocated while nothing can be written back");
        drop(data);
        drop(numbers(MIB / 8, 2).expect("there is room again"));
        return;
    }
    let Some(tmpfs) = Tmpfs::mount("size=16m") else { return };
    let ended = run(name, tmpfs.path().to_str().expect("UTF-8"), |_| ());
    ended.expect_success();
}

/// Fills far memory by read(2) until the device is full, which is EFAULT there, and checks what
/// can still be read by write(2).
fn fill_by_system_calls(heap: &Heap) -> FarVec<u64, Far> {
    let mut data: FarVec<u64, Far> = FarVec::new_in(Far);
    data.try_reserve_exact(64 * MIB / 8).expect("addresses cost nothing");
    let (mut reader, mut writer) = std::io::pipe().expect("a pipe");
    let mut pages = 0;
    let full = loop {
        let seed = pages as u64;
        let bytes: Vec<u8> =
            (0..PAGE_WORDS as u64).flat_map(|n| number(n, seed).to_le_bytes()).collect();
        writer.write_all(&bytes).expect("a pipe holds 64 KiB");
        match read_page(&mut reader, &mut data) {
            Ok(()) => pages += 1,
            Err(error) => break error,
        }
        assert!(pages < 64 << 4, "64 MiB in 8 MiB of memory and 16 MiB of device");
    };
    assert_eq!(full.raw_os_error(), Some(libc::EFAULT), "{full}");
    assert!(pages >= 16 << 4, "{pages} pages of 64 KiB in 8 MiB and 16 MiB");
    let (mut right, mut lost) = (0, 0);
    for page in 0..pages {
        let (mut reader, mut writer) = std::io::pipe().expect("a pipe");
        let words = &data[page * PAGE_WORDS..][..PAGE_WORDS];
        match writer.write_all(bytes_of(words)) {
            Ok(()) => {
                drop(writer);
                let mut bytes = Vec::new();
                reader.read_to_end(&mut bytes).expect("a pipe");
                let seen = bytes.chunks_exact(8).map(|word| word.try_into().expect("8 bytes"));
                let seen: Vec<u64> = seen.map(u64::from_le_bytes).collect();
                assert_numbers(&seen, page as u64);
                right += 1;
            }
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(libc::EFAULT), "{error}");
                lost += 1;
            }
        }
    }
    println!("{pages} pages, {right} right, {lost} lost, {:?}", heap.stats());
    assert_eq!((right, lost), (pages, 0), "what was written stays readable");
    data
}

/// Reads a page's worth of words to the end of `data`.
fn read_page(reader: &mut dyn Read, data: &mut FarVec<u64, Far>) -> std::io::Result<()> {
    let len = data.len();
    assert!(data.capacity() - len >= PAGE_WORDS);
    // SAFETY: within the capacity; the words are not looked at before they are read.
    let start = unsafe { data.as_mut_ptr().add(len) };
    // SAFETY: the rest of the vector's memory, zero since it was mapped; any bytes are words.
    let bytes = unsafe { std::slice::from_raw_parts_mut(start.cast::<u8>(), PAGE_WORDS * 8) };
    reader.read_exact(bytes)?;
    // SAFETY: read just now.
    unsafe { data.set_len(len + PAGE_WORDS) };
    Ok(())
}

fn bytes_of(words: &[u64]) -> &[u8] {
    // SAFETY: words are 8 bytes each without padding, borrowed as long as the result.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
}

#[test]
fn a_device_that_returns_other_bytes_is_a_sigbus_with_the_cause() {
    let name = "a_device_that_returns_other_bytes_is_a_sigbus_with_the_cause";
    if let Some(case) = case(name) {
        let (what, path) = case.split_once(':').expect("a case");
        let Some(heap) = heap(&format!("limit:8MiB,device:{path}")) else { return };
        let data = numbers(16 * MIB / 8, 6).expect("the device has room");
        heap.evict_all().expect("the device has room");
        let file = File::options().write(true).open(path).expect("the device");
        match what {
            "corrupt" => {
                let piece = vec![0xAA; MIB];
                (0..64).for_each(|n| file.write_all_at(&piece, n << 20).expect("write"));
            }
            _ => file.set_len(0).expect("truncate"),
        }
        assert_numbers(&data, 6);
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    for (what, cause) in [("corrupt", "checksum mismatch"), ("truncated", "errno 5 (EIO)")] {
        let path = sparse(&dir.path().join(what), 64 << 20);
        let ended = run(name, &format!("{what}:{path}"), |_| ());
        if ended.show_skips() {
            return;
        }
        assert_sigbus(&ended, cause);
    }
}

#[test]
fn a_device_that_holds_data_is_refused_unless_it_may_be_overwritten() {
    alone("a_device_that_holds_data_is_refused_unless_it_may_be_overwritten", || {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("precious");
        let data: Vec<u8> = (0..16_u32 << 20).map(|n| (n % 251) as u8 + 1).collect();
        fs::write(&path, &data).expect("written");
        let conf = format!("limit:8MiB,device:{}", path.display());
        match start(&conf) {
            Err(Error::UffdUnavailable { reasons }) => return println!("skipped: {reasons}"),
            Err(Error::Device { reason, .. }) => {
                assert!(reason.contains("would be lost") && reason.contains("overwrite:on"));
            }
            other => panic!("{other:?}"),
        }
        assert!(fs::read(&path).expect("read") == data, "as it was");
        let heap = start(&format!("{conf},overwrite:on")).expect("allowed");
        heap.shutdown().expect("nothing is in use");
        drop(heap);
        // From now on it is ours.
        start(&conf).expect("marked").shutdown().expect("nothing is in use");
    });
}
