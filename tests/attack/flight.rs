//! Far memory that the kernel still reads or writes when the call has returned: zero-copy sends,
//! pages in pipes, rings and direct I/O.
#![expect(unsafe_code, reason = "hands attacked memory to rings")]

use crate::common::bytes;
use crate::ground::{Ground, UNIT, allocate, attacks, free, stamp};
use crate::kernel::{Errno, addr, addr_mut, call, fd, pipe, take};
use farheap::region::Advice;
use farheap::{ByteCount, Heap};
use io_uring::{IoUring, opcode, squeue, types};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};

attacks! {
    zero_copy_sends_carry_the_bytes_that_were_sent: all,
    pages_in_pipes_keep_their_bytes: all,
    pages_in_pipes_reach_sockets: all,
    memory_dropped_while_it_is_in_a_pipe_arrives: all,
    rings_send_without_copies: all,
    rings_read_and_write_registered_memory: all,
    direct_reads_and_writes_lose_nothing: all,
    asynchronous_reads_and_writes_lose_nothing: all,
}

impl Ground {
    /// Pins what is attacked where the kernel could not reach it, or where a page that it
    /// `writes` could be dropped.
    fn held(&self, writes: bool, body: impl FnOnce()) {
        if !self.kernel || (writes && self.drops_busy_pages()) {
            self.pinned(body);
        } else {
            body();
        }
    }

    /// Gives both twins the same new content.
    fn refill(&self, number: u64) {
        self.far.fill(number);
        self.near.fill(number);
    }

    /// Has everything evicted that can be, and used for other pages.
    fn recycle(&self) {
        drop(self.evict_far());
        self.await_passes(1);
    }

    fn assert_sent(&self, what: &str, from: usize, got: &[u8]) {
        let want = self.near.bytes(from..from + got.len());
        if got != want {
            let at = got.iter().zip(&want).position(|(got, want)| got != want);
            panic!("{what}: byte {} of {} is not what was sent", at.unwrap_or(0), got.len());
        }
    }
}

/// A connection over the loopback whose receiver takes little at a time.
fn connection() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let small = addr(&4096_i32);
    let (level, option) = (libc::SOL_SOCKET as usize, libc::SO_RCVBUF as usize);
    call(libc::SYS_setsockopt, &[fd(&listener), level, option, small, 4]).expect("a small buffer");
    let out = TcpStream::connect(listener.local_addr().expect("an address")).expect("connects");
    let large = addr(&(4_i32 << 20));
    let option = libc::SO_SNDBUFFORCE as usize;
    let _unprivileged = call(libc::SYS_setsockopt, &[fd(&out), level, option, large, 4]);
    (out, listener.accept().expect("connected").0)
}

/// Receives this number of bytes.
fn receive(mut from: &TcpStream, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    from.read_exact(&mut bytes).expect("the sender sent them");
    bytes
}

fn zero_copy_sends_carry_the_bytes_that_were_sent(ground: &Ground) {
    const MSG_ZEROCOPY: usize = 0x400_0000;
    const CHUNK: usize = 64 << 10;
    for round in 0..ground.rounds(2) as u64 {
        ground.refill(round);
        let (out, into) = connection();
        let (level, option) = (libc::SOL_SOCKET as usize, libc::SO_ZEROCOPY as usize);
        call(libc::SYS_setsockopt, &[fd(&out), level, option, addr(&1_i32), 4]).expect("TCP can");
        ground.held(false, || {
            let mut sent = 0;
            while sent < ground.far.len {
                let flags = MSG_ZEROCOPY | libc::MSG_DONTWAIT as usize;
                let len = CHUNK.min(ground.far.len - sent);
                let args = [fd(&out), ground.far.at(sent), len, flags, 0, 0];
                match call(libc::SYS_sendto, &args) {
                    Ok(n) => sent += n,
                    // As much as a sender may have under way.
                    Err(libc::EAGAIN | libc::ENOBUFS) => break,
                    Err(error) => panic!("send: {error}"),
                }
            }
            assert!(sent >= CHUNK, "{sent} bytes are too few");
            ground.recycle();
            ground.assert_sent("zero-copy send", 0, &receive(&into, sent));
        });
        ground.assert_alike("sent");
    }
}

/// Fills a pipe with references to attacked memory; returns how many bytes it took.
fn fill_pipe(ground: &Ground, into: &OwnedFd, from: usize) -> usize {
    let size = libc::F_SETPIPE_SZ as usize;
    let _unprivileged = call(libc::SYS_fcntl, &[fd(into), size, 1 << 20]);
    let len = (ground.far.len - from).min(1 << 20);
    let vector = [ground.far.at(from), len];
    let flags = libc::SPLICE_F_NONBLOCK as usize;
    call(libc::SYS_vmsplice, &[fd(into), addr(&vector), 1, flags]).expect("room in the pipe")
}

fn pages_in_pipes_keep_their_bytes(ground: &Ground) {
    for round in 0..ground.rounds(2) as u64 {
        ground.refill(round);
        let (out, into) = pipe();
        ground.held(false, || {
            let from = round as usize % 3 * UNIT;
            let mut left = fill_pipe(ground, &into, from);
            assert!(left >= 16 * UNIT, "{left} bytes are too few");
            ground.recycle();
            let mut got = Vec::new();
            while left > 0 {
                let bytes = take(&out, left);
                left -= bytes.len();
                got.extend(bytes);
            }
            ground.assert_sent("vmsplice", from, &got);
        });
        ground.assert_alike("sent");
    }
}

fn pages_in_pipes_reach_sockets(ground: &Ground) {
    for round in 0..ground.rounds(2) as u64 {
        ground.refill(round);
        let ((out, into), (sender, receiver)) = (pipe(), connection());
        ground.held(false, || {
            let filled = fill_pipe(ground, &into, 0);
            let flags = libc::SPLICE_F_NONBLOCK as usize;
            sender.set_nonblocking(true).expect("a socket");
            let args = [fd(&out), 0, fd(&sender), 0, filled, flags];
            let sent = call(libc::SYS_splice, &args).expect("room at the sender");
            ground.recycle();
            ground.assert_sent("vmsplice and splice", 0, &receive(&receiver, sent));
        });
        ground.assert_alike("sent");
    }
}

/// What the kernel was given of a page stays, and what was dropped of it is zero, also when it comes back.
fn memory_dropped_while_it_is_in_a_pipe_arrives(ground: &Ground) {
    const LEN: usize = 4 * UNIT;
    for round in 0..ground.rounds(6) as u64 {
        // Fresh memory, which the kernel may fill by itself; such that was evicted, and is written; or is read.
        let fresh = (round % 3 == 0).then(|| allocate(ground.far.len));
        let stretch = fresh.unwrap_or(ground.far);
        stretch.fill(round);
        ground.near.fill(round);
        if round % 3 == 1 {
            drop(ground.evict_far());
            ground.refill(round + 100);
        }
        let (all, all_len) = (stretch.at(0) as *const u8, ByteCount(stretch.len as u64));
        // Whole clusters, and parts of several.
        for at in [0, LEN + UNIT, 2 * LEN] {
            if round % 3 == 2 {
                drop(ground.evict_far());
            }
            let (out, into) = pipe();
            let pin = || {
                ground.heap.region().pin(bytes(all, all_len)).expect("a small part of the limit")
            };
            let pinned = (!ground.kernel).then(pin);
            let vector = [stretch.at(at), LEN];
            let flags = libc::SPLICE_F_NONBLOCK as usize;
            let sent = call(libc::SYS_vmsplice, &[fd(&into), addr(&vector), 1, flags]);
            assert_eq!(sent, Ok(LEN), "the pipe has room");
            drop(pinned);
            // SAFETY: the attack gives the content up.
            let dropped = unsafe {
                Heap::madvise(
                    bytes(stretch.at(at) as *mut u8, ByteCount(LEN as u64)).cast_mut(),
                    libc::MADV_DONTNEED,
                )
            };
            assert_eq!(dropped, Ok(true));
            let mut got = Vec::new();
            while got.len() < LEN {
                got.extend(take(&out, LEN - got.len()));
            }
            ground.assert_sent("vmsplice of what was dropped then", at, &got);
            ground.near.put(at, &[0; LEN]);
            for when in ["dropped", "dropped, and evicted"] {
                let same = stretch.bytes(0..stretch.len) == ground.near.bytes(0..stretch.len);
                assert!(same, "round {round}: {when} from {at} on");
                drop(ground.heap.region().advise(&[bytes(all, all_len)], Advice::PageOutNow));
            }
        }
        ground.refill(round);
        if let Some(fresh) = fresh {
            free(fresh);
        }
    }
}

/// A ring, or `None` with the reason printed.
fn ring(entries: u32) -> Option<IoUring> {
    let made = IoUring::new(entries);
    made.inspect_err(|error| println!("skipped: io_uring is not permitted here: {error}")).ok()
}

/// Submits all and waits for their results, by their user data.
fn complete(ring: &mut IoUring, entries: &[squeue::Entry]) -> Vec<i32> {
    for entry in entries {
        // SAFETY: what the entries name stays as it is until all are complete.
        unsafe { ring.submission().push(entry) }.expect("as deep as the batch");
    }
    let mut results = vec![None; entries.len()];
    while results.iter().any(Option::is_none) {
        ring.submit_and_wait(1).expect("io_uring works");
        for entry in ring.completion() {
            results[entry.user_data() as usize] = Some(entry.result());
        }
    }
    results.into_iter().flatten().collect()
}

fn rings_send_without_copies(ground: &Ground) {
    const CHUNK: usize = 32 << 10;
    const SENDS: usize = 8;
    let Some(mut ring) = ring(32) else { return };
    for round in 0..ground.rounds(2) as u64 {
        ground.refill(round);
        let (out, into) = connection();
        ground.held(false, || {
            let send = |n: usize| {
                let from = ground.far.at(n * CHUNK) as *const u8;
                opcode::SendZc::new(types::Fd(out.as_raw_fd()), from, CHUNK as u32)
                    .build()
                    .flags(squeue::Flags::IO_LINK)
                    .user_data(n as u64)
            };
            for n in 0..SENDS {
                // SAFETY: the memory is not changed before all of it has arrived.
                unsafe { ring.submission().push(&send(n)) }.expect("as deep as the batch");
            }
            ring.submit().expect("io_uring works");
            ground.recycle();
            let got = receive(&into, SENDS * CHUNK);
            ground.assert_sent("zero-copy send of a ring", 0, &got);
            // Both completions of each: what was sent, and that the memory is free again.
            ring.submit_and_wait(2 * SENDS).expect("io_uring works");
            let results: Vec<_> = ring.completion().map(|entry| entry.result()).collect();
            assert!(results.len() == 2 * SENDS && results.iter().all(|n| *n >= 0), "{results:?}");
        });
        ground.assert_alike("sent");
    }
}

/// Bytes of one direct transfer.
const BLOCK: usize = 16 << 10;
const BLOCKS: usize = 32;

/// A file for direct I/O that holds known content in its first half.
struct Direct(File);

impl Direct {
    fn new() -> Direct {
        let mut dir = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        if tempfile::tempfile_in(&dir).is_err() {
            dir = std::env::temp_dir();
        }
        let dir = tempfile::tempdir_in(dir).expect("a directory");
        let path = dir.path().join("direct");
        let mut file = File::create(&path).expect("a file");
        for word in 0..BLOCK * BLOCKS / 8 {
            file.write_all(&stamp(99, word).to_ne_bytes()).expect("space");
        }
        file.sync_all().expect("the file is on the disk");
        let mut options = File::options();
        options.read(true).write(true);
        let direct = options.clone().custom_flags(libc::O_DIRECT).open(&path);
        Direct(direct.unwrap_or_else(|_| options.open(&path).expect("just written")))
    }

    /// The content of a block that was written to the second half.
    fn written(&self, block: usize) -> Vec<u8> {
        // Aligned for direct I/O.
        let mut bytes = vec![0; BLOCK + UNIT];
        let start = addr(&bytes[..]).next_multiple_of(UNIT) - addr(&bytes[..]);
        let place = &mut bytes[start..start + BLOCK];
        let offset = ((BLOCKS + block) * BLOCK) as u64;
        self.0.read_exact_at(place, offset).expect("was written");
        place.to_vec()
    }
}

/// The first half of the memory is read into, the second written from.
fn direct_transfers(ground: &Ground, mut transfer: impl FnMut(&Direct, &[usize])) {
    let file = Direct::new();
    let mut dice = ground.dice();
    let half = ground.far.len / 2;
    for round in 0..ground.rounds(4) as u64 {
        ground.refill(round);
        let places: Vec<_> = (0..BLOCKS)
            .map(|block| {
                let part = half / BLOCKS / UNIT;
                (block * part + dice.below((part - BLOCK / UNIT) as u64 + 1) as usize) * UNIT
            })
            .collect();
        ground.held(true, || transfer(&file, &places));
        for (block, place) in places.iter().enumerate() {
            for word in 0..BLOCK / 8 {
                ground.near.set_word(place + word * 8, stamp(99, block * BLOCK / 8 + word));
            }
            ground.assert_sent("direct write", half + place, &file.written(block));
        }
        ground.assert_alike("direct reads");
    }
}

fn direct_reads_and_writes_lose_nothing(ground: &Ground) {
    let half = ground.far.len / 2;
    direct_transfers(ground, |file, places| {
        let step = |number, first: usize, at: usize| {
            for (block, place) in places.iter().enumerate() {
                let offset = (first + block) * BLOCK;
                let args = [fd(&file.0), ground.far.at(at + place), BLOCK, offset];
                assert_eq!(call(number, &args), Ok(BLOCK), "block {block}");
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| step(libc::SYS_pwrite64, BLOCKS, half));
            step(libc::SYS_pread64, 0, 0);
        });
    });
}

fn rings_read_and_write_registered_memory(ground: &Ground) {
    let Some(mut ring) = ring(2 * BLOCKS as u32) else { return };
    if ground.drops_busy_pages() {
        // The ring holds the pages that were there when the memory was registered.
        ground.pinned(|| registered_transfers(ground, &mut ring));
    } else {
        registered_transfers(ground, &mut ring);
    }
}

fn registered_transfers(ground: &Ground, ring: &mut IoUring) {
    let half = ground.far.len / 2;
    let whole = libc::iovec { iov_base: ground.far.at(0) as *mut libc::c_void, iov_len: 2 * half };
    // Registered memory is pinned by the kernel for as long, whatever its pages do.
    let mut registered: Result<(), Errno> = Err(0);
    ground.held(true, || {
        // SAFETY: the memory outlives the ring's use of it.
        let done = unsafe { ring.submitter().register_buffers(&[whole]) };
        registered = done.map_err(|error| error.raw_os_error().unwrap_or(0));
    });
    if let Err(error) = registered {
        assert_eq!(error, libc::ENOMEM, "memory to lock is the only thing that may be missing");
        println!("skipped: not enough memory may be locked (ulimit -l)");
        return;
    }
    direct_transfers(ground, |file, places| {
        let target = types::Fd(file.0.as_raw_fd());
        let mut entries = Vec::new();
        for (block, place) in places.iter().enumerate() {
            let (to, from) = (ground.far.at(*place), ground.far.at(half + place));
            let read = opcode::ReadFixed::new(target, to as *mut u8, BLOCK as u32, 0);
            let read = read.offset((block * BLOCK) as u64).build();
            let write = opcode::WriteFixed::new(target, from as *const u8, BLOCK as u32, 0);
            let write = write.offset(((BLOCKS + block) * BLOCK) as u64).build();
            entries.push(read.user_data(entries.len() as u64));
            entries.push(write.user_data(entries.len() as u64));
        }
        let results = complete(ring, &entries);
        assert!(results.iter().all(|n| *n == BLOCK as i32), "{results:?}");
    });
    ring.submitter().unregister_buffers().expect("were registered");
}

/// `struct iocb`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Control {
    data: u64,
    key: u64,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    len: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    event: u32,
}
const _: () = assert!(size_of::<Control>() == 64);

fn asynchronous_reads_and_writes_lose_nothing(ground: &Ground) {
    const PREAD: u16 = 0;
    const PWRITE: u16 = 1;
    let mut context = 0_usize;
    let entries = 2 * BLOCKS;
    call(libc::SYS_io_setup, &[entries, addr_mut(&mut context)]).expect("a context");
    let half = ground.far.len / 2;
    direct_transfers(ground, |file, places| {
        let control = |opcode, from: usize, offset: usize| Control {
            opcode,
            fd: fd(&file.0) as u32,
            buffer: ground.far.at(from) as u64,
            len: BLOCK as u64,
            offset: offset as i64,
            ..Control::default()
        };
        let both = places.iter().enumerate().flat_map(|(block, place)| {
            let read = control(PREAD, *place, block * BLOCK);
            [read, control(PWRITE, half + place, (BLOCKS + block) * BLOCK)]
        });
        let controls: Vec<Control> = both.collect();
        let pointers: Vec<usize> = controls.iter().map(addr).collect();
        let mut submitted = 0;
        while submitted < entries {
            let rest = &pointers[submitted..];
            submitted +=
                call(libc::SYS_io_submit, &[context, rest.len(), addr(rest)]).expect("aio");
        }
        // data, the control, its result, a second one
        let mut events = vec![[0_u64; 4]; entries];
        let args = [context, entries, entries, addr_mut(&mut events[..]), 0];
        assert_eq!(call(libc::SYS_io_getevents, &args), Ok(entries));
        assert!(events.iter().all(|event| event[2] == BLOCK as u64), "{events:?}");
    });
    call(libc::SYS_io_destroy, &[context]).expect("was set up");
}
