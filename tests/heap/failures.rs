//! Devices that cannot be used, fill up, lose data: an error or a documented SIGBUS with a
//! message, never a hang, never other bytes than were written.
//!
//! Guards: G4, G5, G6, G9.

#![expect(unsafe_code, reason = "sees words as bytes")]

use crate::common::child::{Ended, alone, case, run, run_under};
use crate::common::place::{LoopDevice, Tmpfs};
use crate::common::{eventually, heap, is_root};
use allocator_api2::vec::Vec as FarVec;
use farheap::{ByteCount, Error, Far, Heap};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;

const MIB: usize = 1 << 20;
/// For what the device never does: the default of 30 s waits for devices that recover.
const SHORT: &str = "deadline:3s";
const PAGE_WORDS: usize = (64 << 10) / 8;

fn start(conf: &str) -> farheap::Result<Heap> {
    Heap::builder().parse(conf).expect("known keys").start()
}

/// Allocates and writes; `Err` when there is no memory.
fn numbers(words: usize, seed: u64) -> Result<FarVec<u64, Far>, ()> {
    let mut numbers = granted(words)?;
    fill(&mut numbers, seed);
    Ok(numbers)
}

/// Memory that was granted and not touched; `Err` when there is none.
fn granted(words: usize) -> Result<FarVec<u64, Far>, ()> {
    let mut numbers = FarVec::new_in(Far);
    numbers.try_reserve_exact(words).map_err(drop)?;
    Ok(numbers)
}

/// Writes as many words as there is memory for.
fn fill(numbers: &mut FarVec<u64, Far>, seed: u64) {
    numbers.extend((0..numbers.capacity() as u64).map(|n| number(n, seed)));
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
        ];
        for (conf, path, reason) in refused {
            let limit = if conf.contains("limit") { "" } else { "far_limit:8MiB," };
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
        let heap =
            start(&format!("far_limit:8MiB,device:{odd}")).expect("an odd length is no error");
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
        let error = match start(&format!("far_limit:8MiB,device:{text}")) {
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
        let error = start(&format!("far_limit:8MiB,device:{path}")).expect_err("in use");
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
        let Some(heap) = heap("far_limit:8MiB,capacity:16MiB") else { return };
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
        let Some(heap) = heap(&format!("far_limit:8MiB,capacity:64MiB,dir:{dir}")) else { return };
        let mut data = granted(48 * MIB / 8).expect("limit and device have room");
        let balloon = balloon(dir.as_ref(), 56 * MIB);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert!(eventually(|| heap.stats().write_errors > 0), "the device fills up");
                fs::remove_file(&balloon).expect("the balloon");
            });
            fill(&mut data, 3);
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
    if !ended.text.contains("skipped") {
        assert!(ended.text.contains("ENOSPC"), "{}", ended.text);
        let cause = format!("unlinked file in {}, 64.0 MiB", tmpfs.path().display());
        assert!(ended.text.contains(&cause), "{cause} is not in:\n{}", ended.text);
        assert!(ended.text.contains("free space on its file system"), "{}", ended.text);
    }
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
        let Some(_heap) = heap(&format!("far_limit:8MiB,capacity:96MiB,{SHORT},{place}")) else {
            return;
        };
        let mut data = granted(64 * MIB / 8).expect("there is room");
        if let Some(dir) = place.strip_prefix("dir:") {
            balloon(dir.as_ref(), 80 * MIB);
        }
        fill(&mut data, 5);
        panic!("64 MiB in 8 MiB of memory and 16 MiB of device");
    }
    let Some(tmpfs) = Tmpfs::mount("size=96m") else { return };
    let ended = run(name, &format!("dir:{}", tmpfs.path().display()), |_| ());
    if ended.show_skips() {
        return;
    }
    assert_sigbus(&ended, "ENOSPC");
    drop(tmpfs);
    let Some(tmpfs) = Tmpfs::mount("size=16m") else { return };
    let backing = tmpfs.path().join("backing");
    sparse(&backing, 100 << 20);
    let Some(device) = LoopDevice::attach(&backing, &[]) else { return };
    let ended = run(name, &format!("device:{}", device.path().display()), |_| ());
    assert_sigbus(&ended, "errno");
}

#[test]
fn allocations_fail_while_the_device_is_full() {
    let name = "allocations_fail_while_the_device_is_full";
    if let Some(dir) = case(name) {
        let Some(heap) = heap(&format!("far_limit:8MiB,capacity:96MiB,{SHORT},dir:{dir}")) else {
            return;
        };
        if !heap.region().serves_kernel_faults() {
            return println!("skipped: only faults of user mode are permitted here");
        }
        let data = granted(64 * MIB / 8).expect("there is room");
        balloon(dir.as_ref(), 80 * MIB);
        let data = fill_by_system_calls(&heap, data);
        assert!(numbers(MIB / 8, 1).is_err(), "allocated while nothing can be written back");
        drop(data);
        drop(numbers(MIB / 8, 2).expect("there is room again"));
        return;
    }
    let Some(tmpfs) = Tmpfs::mount("size=96m") else { return };
    let ended = run(name, tmpfs.path().to_str().expect("UTF-8"), |_| ());
    ended.expect_success();
}

/// Fills far memory by read(2) until the device is full, which is EFAULT there, and checks what
/// can still be read by write(2).
fn fill_by_system_calls(heap: &Heap, mut data: FarVec<u64, Far>) -> FarVec<u64, Far> {
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
    assert!(pages >= 16 << 4, "{pages} times 64 KiB in 8 MiB and 16 MiB");
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
fn far_memory_is_refused_while_others_fill_the_file_system() {
    let name = "far_memory_is_refused_while_others_fill_the_file_system";
    if let Some(dir) = case(name) {
        let Some(heap) = heap(&format!("far_limit:8MiB,capacity:56MiB,dir:{dir}")) else { return };
        let kept = numbers(16 * MIB / 8, 1).expect("there is room");
        let balloon = balloon(dir.as_ref(), 40 * MIB);
        // 64 MiB less 40 are 24: with the 8 of the limit no 48, which the capacity alone has.
        assert!(eventually(|| granted(32 * MIB / 8).is_err()), "granted what has no room");
        let error = heap.region().map(ByteCount::mib(32)).expect_err("the same").to_string();
        assert!(error.contains("free space there") && error.contains(&dir), "{error}");
        drop(numbers(4 * MIB / 8, 2).expect("there is room for some"));
        fs::remove_file(&balloon).expect("the balloon");
        assert!(eventually(|| granted(32 * MIB / 8).is_ok()), "there is room again");
        assert_numbers(&kept, 1);
        return;
    }
    let Some(tmpfs) = Tmpfs::mount("size=64m") else { return };
    run(name, tmpfs.path().to_str().expect("UTF-8"), |_| ()).expect_success();
}

#[test]
fn reserved_space_is_there_when_others_have_filled_the_file_system() {
    let name = "reserved_space_is_there_when_others_have_filled_the_file_system";
    if let Some(place) = case(name) {
        let (dir, key) = place.split_once(' ').expect("a case");
        let conf = format!("far_limit:8MiB,capacity:48MiB,reserve:on,{key}");
        let Some(heap) = heap(&conf) else { return };
        let mut data = granted(40 * MIB / 8).expect("there is room");
        let mut balloon = File::create(Path::new(dir).join("balloon")).expect("a file");
        let block = vec![1_u8; MIB];
        while balloon.write_all(&block).is_ok() {}
        for seed in 0..2 {
            data.clear();
            fill(&mut data, seed);
            assert_numbers(&data, seed);
            drop(data);
            heap.purge(); // What is given back is not given to others.
            while balloon.write_all(&block).is_ok() {}
            data = granted(40 * MIB / 8).expect("as before");
        }
        drop(data);
        assert_eq!((heap.stats().write_errors, heap.stats().poisoned), (0, 0));
        return heap.shutdown().expect("nothing is in use");
    }
    for key in ["dir:", "device:"] {
        let Some(tmpfs) = Tmpfs::mount("size=64m") else { return };
        let dir = tmpfs.path().display();
        let place = if key == "dir:" { "" } else { "/store" };
        run(name, &format!("{dir} {key}{dir}{place}"), |_| ()).expect_success();
    }
}

#[test]
fn space_that_cannot_be_reserved_is_refused_at_the_start() {
    let name = "space_that_cannot_be_reserved_is_refused_at_the_start";
    if let Some(dir) = case(name) {
        let file = sparse(&Path::new(&dir).join("store"), 128 << 20);
        for place in [format!("dir:{dir}"), format!("device:{file}")] {
            let conf = format!("far_limit:8MiB,capacity:128MiB,reserve:on,{place}");
            let error = start(&conf).expect_err("64 MiB").to_string();
            assert!(error.contains("has no 12") && error.contains("free space there"), "{error}");
            assert!(error.contains(&dir), "{error}");
        }
        let left = fs::metadata(&file).expect("the file").blocks() * 512;
        return assert!(left <= 4096, "{left} bytes stay with the file");
    }
    let Some(tmpfs) = Tmpfs::mount("size=64m") else { return };
    run(name, tmpfs.path().to_str().expect("UTF-8"), |_| ()).expect_success();
}

#[test]
fn a_directory_in_memory_is_warned_of() {
    let name = "a_directory_in_memory_is_warned_of";
    if let Some(place) = case(name) {
        drop(heap(&format!("far_limit:8MiB,capacity:16MiB,{place}")));
        return;
    }
    let Some(tmpfs) = Tmpfs::mount("size=64m") else { return };
    let dir = tmpfs.path().display();
    let on_disk = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let on_disk = on_disk.path().display();
    for (place, warned) in [
        (format!("dir:{dir}"), true),
        (format!("device:{dir}/store"), true),
        (format!("dir:{on_disk}"), false),
    ] {
        let ended = run(name, &place, |_| ());
        ended.expect_success();
        assert_eq!(ended.text.contains("this file system is in memory"), warned, "{}", ended.text);
    }
    // Without a directory, `/var/tmp` where `/tmp` is in memory.
    let ended = run(name, "handlers:1", |command| {
        command.env("TMPDIR", tmpfs.path());
    });
    assert!(ended.text.contains("this file system is in memory"), "it was asked for");
}

#[test]
fn a_file_longer_than_this_process_may_write_is_an_error_not_a_signal() {
    let name = "a_file_longer_than_this_process_may_write_is_an_error_not_a_signal";
    if let Some(path) = case(name) {
        // 16 MiB a file, set by the parent.
        for place in
            ["dir:/var/tmp".to_owned(), format!("device:{path}"), format!("device:{path}2")]
        {
            let conf = format!("far_limit:8MiB,capacity:64MiB,{place}");
            let error = start(&conf).expect_err("too long").to_string();
            assert!(error.contains("ulimit -f") && error.contains("16.0 MiB"), "{error}");
        }
        // Without a capacity it is what the process may write.
        let Some(heap) = heap("far_limit:8MiB,dir:/var/tmp") else { return };
        let data = numbers(12 * MIB / 8, 1).expect("there is room");
        heap.region().evict_all().expect("written");
        assert_numbers(&data, 1);
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let path = sparse(&dir.path().join("store"), 64 << 20);
    let ended = run_under(&["prlimit", "--fsize=16777216"], name, &path, |_| ());
    ended.expect_success();
    assert!(!dir.path().join("store2").exists(), "nothing is left behind");
}

#[test]
fn a_device_that_returns_other_bytes_is_a_sigbus_with_the_cause() {
    let name = "a_device_that_returns_other_bytes_is_a_sigbus_with_the_cause";
    if let Some(case) = case(name) {
        let (what, path) = case.split_once(':').expect("a case");
        let Some(heap) = heap(&format!("far_limit:8MiB,{SHORT},device:{path}")) else { return };
        let data = numbers(16 * MIB / 8, 6).expect("the device has room");
        heap.region().evict_all().expect("the device has room");
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
        let conf = format!("far_limit:8MiB,device:{}", path.display());
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
