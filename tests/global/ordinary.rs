//! What programs do with ordinary memory, done with the global allocator as it is by default: with
//! all faults permitted, and with faults of user mode only, which is what unprivileged programs
//! have on most distributions.
//!
//! Guards: G5.

#![expect(unsafe_code, reason = "allocates aligned memory, calls getrandom")]

use crate::common::child::{case, run};
use crate::common::refuse::{Refused, refuse};
use crate::common::{Dice, heap, seed};
use farheap::{ByteCount, Far, Heap, Scope, Tier};
use std::alloc::Layout;
use std::fs::{self, File, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::slice;

const MIB: usize = 1 << 20;

/// What runs with all faults, and what with faults of user mode only.
const FAULTS: [Option<Refused>; 2] = [None, Some(Refused::KernelFaults)];

fn random(bytes: usize, dice: &mut Dice) -> Vec<u8> {
    let words = (0..bytes.div_ceil(8)).flat_map(|_| dice.roll().to_le_bytes());
    words.take(bytes).collect()
}

/// Whole files, as bytes and as text, growing buffers and given ones.
fn files(dir: &Path, dice: &mut Dice) {
    let path = dir.join("file");
    let written = random(MIB + 5, dice);
    fs::write(&path, &written).expect("write a file");
    assert!(fs::read(&path).expect("read a file") == written, "other bytes than were written");
    let mut zeroed = vec![0; written.len()];
    File::open(&path).and_then(|mut file| file.read_exact(&mut zeroed)).expect("read_exact");
    assert!(zeroed == written, "other bytes than were written");
    let mut grown = vec![7; 100];
    File::open(&path).and_then(|mut file| file.read_to_end(&mut grown)).expect("read_to_end");
    assert!(grown[100..] == written, "other bytes than were written");
    let text = "a line of text\n".repeat(100_000);
    fs::write(&path, &text).expect("write a text");
    assert!(fs::read_to_string(&path).expect("read a text") == text, "another text");
    let copied = dir.join("copy");
    fs::copy(&path, &copied).expect("copy");
    assert_eq!(fs::metadata(&copied).expect("metadata").len(), text.len() as u64);
}

/// A buffer that `O_DIRECT` accepts.
fn direct(dir: &Path, dice: &mut Dice) {
    let written = random(MIB, dice);
    let path = dir.join("direct");
    fs::write(&path, &written).expect("write");
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&path);
    let Ok(file) = file else { return println!("no O_DIRECT in {}", dir.display()) };
    let layout = Layout::from_size_align(MIB, 4096).expect("a layout");
    // SAFETY: the layout is not empty.
    let block = unsafe { std::alloc::alloc_zeroed(layout) };
    assert!(!block.is_null(), "no memory");
    // SAFETY: the block has `MIB` bytes, initialised, and nobody else uses it.
    let buffer = unsafe { slice::from_raw_parts_mut(block, MIB) };
    file.read_exact_at(buffer, 0).expect("a direct read");
    assert!(buffer == written, "other bytes than were written");
    // SAFETY: allocated above with this layout; the slice is not used any more.
    unsafe { std::alloc::dealloc(block, layout) };
}

/// From one thread's buffer into another's.
fn transfer(mut writer: impl Write + Send, mut reader: impl Read, dice: &mut Dice) {
    let written = random(MIB, dice);
    let mut read = vec![0; MIB];
    std::thread::scope(|scope| {
        scope.spawn(|| writer.write_all(&written).expect("write"));
        reader.read_exact(&mut read).expect("read");
    });
    assert!(written == read, "other bytes than were written");
}

/// A pipe, a socket, several buffers at once.
fn streams(dice: &mut Dice) {
    let (reader, writer) = io::pipe().expect("a pipe");
    transfer(writer, reader, dice);
    let (reader, writer) = UnixStream::pair().expect("sockets");
    transfer(writer, reader, dice);
    let (mut reader, mut writer) = UnixStream::pair().expect("sockets");
    let sent = [random(MIB / 8, dice), random(MIB / 8, dice)];
    let mut got = [vec![0; MIB / 8], vec![0; MIB / 8]];
    let (sent_bytes, got_bytes) = std::thread::scope(|scope| {
        let parts = sent.each_ref().map(|part| IoSlice::new(part));
        let sender = scope.spawn(move || writer.write_vectored(&parts).expect("writev"));
        let mut parts = got.each_mut().map(|part| IoSliceMut::new(part));
        let got_bytes = read_parts(&mut reader, &mut parts);
        (sender.join().expect("sent"), got_bytes)
    });
    assert!(sent_bytes > 0 && got_bytes == sent_bytes, "{sent_bytes} sent, {got_bytes} received");
    assert!(got.concat()[..got_bytes] == sent.concat()[..got_bytes], "other bytes than were sent");
}

/// Fills buffers to their end, or to that of what is sent. One call returns what has arrived until then, and a
/// socket does not hold the rest: its writer waits for another.
fn read_parts(reader: &mut impl Read, mut rest: &mut [IoSliceMut<'_>]) -> usize {
    let mut bytes = 0;
    while !rest.is_empty() {
        let got = reader.read_vectored(rest).expect("readv");
        if got == 0 {
            break;
        }
        bytes += got;
        IoSliceMut::advance_slices(&mut rest, got);
    }
    bytes
}

/// A program's output and input.
fn programs(dice: &mut Dice) {
    let output = Command::new("head").args(["-c", "1000000", "/dev/zero"]).output();
    assert_eq!(output.expect("head runs").stdout.len(), 1_000_000);
    let written = random(MIB, dice);
    let mut child = Command::new("cat");
    let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("cat runs");
    let mut input = child.stdin.take().expect("piped");
    let read = std::thread::scope(|scope| {
        scope.spawn(move || input.write_all(&written).map(|()| written.len()).expect("write"));
        child.wait_with_output().expect("cat ends").stdout
    });
    assert_eq!(read.len(), MIB);
}

/// Memory that was just reserved, and that the kernel is the first to touch.
fn fresh_memory() {
    let mut bytes: Vec<u8> = Vec::with_capacity(MIB);
    let spare = bytes.spare_capacity_mut();
    let mut filled = 0;
    while filled < MIB {
        let rest = &mut spare[filled..];
        // SAFETY: the kernel writes into the rest of the capacity.
        let got = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        assert!(got > 0, "getrandom: {}", io::Error::last_os_error());
        filled += got as usize; // A signal ends a long call early.
    }
    // SAFETY: just initialised.
    unsafe { bytes.set_len(MIB) };
    assert!(bytes.iter().any(|byte| *byte != bytes[0]), "not random");
}

/// Everything above, with `blocks` of 1 MiB alive, which leave through system calls at the end.
fn program(blocks: usize) {
    let mut dice = Dice::new(seed("a program"));
    let dir = tempfile::tempdir().expect("a directory");
    let kept: Vec<Vec<u8>> = (0..blocks).map(|_| random(MIB, &mut dice)).collect();
    files(dir.path(), &mut dice);
    direct(dir.path(), &mut dice);
    streams(&mut dice);
    programs(&mut dice);
    fresh_memory();
    let path = dir.path().join("kept");
    let mut file = File::create(&path).expect("create");
    kept.iter().for_each(|block| file.write_all(block).expect("write what was kept"));
    let file = File::open(&path).expect("open");
    let mut read = vec![0; MIB];
    for (n, block) in kept.iter().enumerate() {
        file.read_exact_at(&mut read, (n * MIB) as u64).expect("read what was kept");
        assert!(read == *block, "block {n} is another");
    }
}

/// The threshold of a heap that nothing else was said to.
const BY_SIZE: Option<ByteCount> = Some(ByteCount::kib(64));

/// What a heap says of sizes that go far agrees with where they go.
fn assert_far_from(heap: &Heap, threshold: Option<ByteCount>) {
    assert_eq!(heap.threshold(), threshold);
    let is_far = |size| threshold.is_some_and(|from| size as u64 >= from.0);
    for size in [1, 16, 100, 4096, 40_000, MIB] {
        let far = is_far(size);
        assert_eq!(Far::contains(vec![0_u8; size].as_ptr()), far, "{size}");
        let mut grown = vec![0_u8; size / 2 + 1];
        grown.reserve_exact(size);
        assert_eq!(Far::contains(grown.as_ptr()), is_far(grown.capacity()), "grown to {size}");
        let block = farheap::malloc::allocate(size, 16, None, false).expect("memory");
        assert_eq!(Far::contains(block.as_ptr()), far, "{size}");
        // SAFETY: allocated above and not used any more.
        unsafe { farheap::malloc::free(block) };
    }
}

#[test]
fn a_program_that_works_on_ordinary_memory_works_with_a_heap() {
    let name = "a_program_that_works_on_ordinary_memory_works_with_a_heap";
    let limits =
        [("far_limit:2GiB", 16), ("far_limit:16MiB", 32), ("far_limit:16MiB,threshold:0", 32)];
    if let Some(limit) = case(name) {
        let (conf, blocks) = limits.into_iter().find(|(conf, _)| *conf == limit).expect("a case");
        let Some(heap) = heap(conf) else { return };
        let wanted = if conf.contains("threshold:0") { Some(ByteCount::ZERO) } else { BY_SIZE };
        assert_far_from(&heap, wanted.filter(|_| heap.region().serves_kernel_faults()));
        program(blocks);
        println!("{}", heap.stats());
        return;
    }
    for refused in FAULTS {
        for (conf, _) in limits {
            let ended = run(name, conf, |command| {
                if let Some(refused) = refused {
                    refuse(command, refused);
                }
            });
            ended.expect_success();
            let told = ended.text.contains("So no allocation goes far because of its size");
            assert!(told || refused.is_none(), "nothing was said:\n{}", ended.text);
        }
    }
}

#[test]
fn explicit_placement_is_far_without_faults_of_kernel_mode() {
    let name = "explicit_placement_is_far_without_faults_of_kernel_mode";
    if case(name).is_some() {
        let Some(heap) = heap("far_limit:16MiB,capacity:256MiB") else { return };
        assert_far_from(&heap, None);
        let seed = seed("explicit");
        let mut dice = Dice::new(seed);
        let small = {
            let _far = Scope::enter(Tier::FAR);
            vec![1_u8; 100]
        };
        assert!(Far::contains(small.as_ptr()));
        let blocks: Vec<Vec<u8>> = (0..48)
            .map(|_| {
                let block = random(MIB, &mut dice);
                let _far = Scope::enter(Tier::FAR);
                block.clone()
            })
            .collect();
        assert!(blocks.iter().all(|block| Far::contains(block.as_ptr())));
        assert!(heap.stats().bytes_written.0 > 0 && heap.stats().resident_bytes_max.0 <= 16 << 20);
        let mut dice = Dice::new(seed);
        assert!(blocks.iter().all(|block| *block == random(MIB, &mut dice)), "other bytes");
        return;
    }
    run(name, "", |command| refuse(command, Refused::KernelFaults)).expect_success();
}

#[test]
fn user_mode_far_sends_sizes_far_and_system_calls_fail_as_it_says() {
    let name = "user_mode_far_sends_sizes_far_and_system_calls_fail_as_it_says";
    if case(name).is_some() {
        let Some(heap) = heap("far_limit:16MiB,capacity:256MiB,mode:user") else { return };
        assert_far_from(&heap, BY_SIZE);
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("file");
        let written = vec![5_u8; MIB];
        heap.region().evict_all().expect("everything leaves");
        let refused = fs::write(&path, &written).expect_err("not resident");
        assert_eq!(refused.raw_os_error(), Some(libc::EFAULT), "{refused}");
        let local = {
            let _local = Scope::enter(Tier::LOCAL);
            written.clone()
        };
        fs::write(&path, &local).expect("local memory");
        let _local = Scope::enter(Tier::LOCAL);
        assert!(fs::read(&path).expect("into local memory") == written, "other bytes");
        return;
    }
    let ended = run(name, "", |command| refuse(command, Refused::KernelFaults));
    ended.expect_success();
    assert!(ended.text.contains("fails with EFAULT"), "{}", ended.text);
    assert!(!ended.text.contains("So no allocation goes far"), "{}", ended.text);
}

/// Takes all that the far heap has, in blocks that get smaller and smaller.
fn exhaust() -> Vec<Vec<u8>> {
    let mut kept = Vec::with_capacity(1 << 16);
    let mut size = MIB;
    while size >= 100 {
        let mut block = Vec::new();
        match block.try_reserve_exact(size) {
            Ok(()) => kept.push(block),
            Err(_) => size /= 2,
        }
    }
    kept
}

#[test]
fn a_panic_has_its_backtrace_when_far_memory_is_exhausted() {
    let name = "a_panic_has_its_backtrace_when_far_memory_is_exhausted";
    if case(name).is_some() {
        let Some(_heap) = heap("far_limit:8MiB,capacity:8MiB,mode:user") else { return };
        let _far = Scope::enter(Tier::FAR);
        let kept = exhaust();
        assert!(kept.iter().all(|block| Far::contains(block.as_ptr())));
        assert!(Vec::<u8>::new().try_reserve_exact(MIB).is_err(), "refused as long as none panics");
        panic!("exhausted after {} blocks", kept.len());
    }
    let ended = run(name, "", |command| {
        command.env("RUST_BACKTRACE", "1");
    });
    if ended.show_skips() {
        return;
    }
    assert_eq!(ended.status.code(), Some(101), "{}", ended.text);
    for said in ["exhausted after ", "stack backtrace:", "ordinary.rs"] {
        assert!(ended.text.contains(said), "no `{said}` in:\n{}", ended.text);
    }
}
