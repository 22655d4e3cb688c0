//! Memory that the kernel still reads when its page has left: pipes (`vmsplice`) and sockets
//! (`MSG_ZEROCOPY`) hold references that nobody can see. What they read is what was there.
#![expect(unsafe_code, reason = "hands far memory to system calls")]

use crate::common::{bytes, watchdog};
use crate::harness::{Far, PAGE, config, stamp};
use farheap::ByteCount;
use farheap::region::{FaultMode, Install, RegionConfig};
use std::fs::File;
use std::io::{PipeReader, PipeWriter, Read};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(180);
/// Bytes that a pipe holds unless told otherwise.
const PIPE_BYTES: usize = 64 << 10;
/// Streams that are filled before any of them is read.
const STREAMS: usize = 16;
/// Bytes of far memory that one TCP stream is sent.
const SENT_BYTES: usize = 256 << 10;

/// What a stream delivered is what pages from `first` on were filled with.
fn check_bytes(first: usize, bytes: &[u8], what: &str) {
    for (page, content) in (first..).zip(bytes.chunks_exact(PAGE)) {
        let word = |at: usize| {
            let bytes: [u8; 8] = content[at..at + 8].try_into().expect("eight bytes");
            u64::from_ne_bytes(bytes)
        };
        let want = (stamp(page), !stamp(page));
        assert_eq!((word(0), word(PAGE - 8)), want, "{what}: page {page}");
    }
}

/// A region of twice its limit, filled. The first quarter is for the streams.
fn far(config: RegionConfig) -> Option<(Far, usize)> {
    let pages = (config.limit.0 * 2 / 4096) as usize;
    let far = Far::new(config, pages, 1)?;
    far.fill(0..pages);
    Some((far, pages / 4))
}

/// All other pages come and go, written and read: by scans, whole chunks, and one by one.
fn use_frames_again(far: &Far, mine: usize) {
    for _ in 0..2 {
        far.check(mine..far.pages);
        (mine..far.pages).rev().step_by(3).for_each(|page| far.check(page..page + 1));
        far.fill(mine..far.pages);
    }
}

/// Bytes of the pages from `first` on, all of which are in memory until `send` returns.
fn resident<T>(far: &Far, first: usize, len: usize, send: impl FnOnce(*const u8) -> T) -> T {
    let len = ByteCount(len as u64);
    let _pinned = far.region.pin(bytes(far.ptr(first), len)).expect("a few pages");
    send(far.ptr(first))
}

fn splice(far: &Far, first: usize) -> (PipeReader, PipeWriter) {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let spliced = resident(far, first, PIPE_BYTES, |ptr| {
        let part = libc::iovec { iov_base: ptr.cast_mut().cast(), iov_len: PIPE_BYTES };
        // SAFETY: the pages are far memory that the case only reads.
        unsafe { libc::vmsplice(writer.as_raw_fd(), &part, 1, 0) }
    });
    assert_eq!(spliced, PIPE_BYTES as isize, "{}", std::io::Error::last_os_error());
    (reader, writer)
}

fn pipes(name: &'static str, config: RegionConfig) {
    let _watchdog = watchdog(name, LIMIT);
    let Some((far, mine)) = far(config) else { return };
    let step = PIPE_BYTES.div_ceil(PAGE);
    let firsts: Vec<usize> = (0..mine).step_by(step).take(STREAMS).collect();
    // First as they were filled, then as they were read back.
    for round in 0..2 {
        let mut filled: Vec<_> = firsts.iter().map(|&first| (first, splice(&far, first))).collect();
        far.evict(0..mine);
        use_frames_again(&far, mine);
        for (first, (reader, _writer)) in &mut filled {
            let mut bytes = vec![0u8; PIPE_BYTES];
            reader.read_exact(&mut bytes).expect("it holds as much");
            check_bytes(*first, &bytes, &format!("{name}, round {round}"));
        }
        far.check(0..mine);
        far.evict(0..mine);
    }
    assert!(far.stats().pages_in > 0, "nothing was read back");
}

/// Sends far memory without a copy as long as the socket takes some; how many bytes it took.
fn send_zero_copy(from: &TcpStream, ptr: *const u8) -> usize {
    from.set_nonblocking(true).expect("a socket");
    let one: libc::c_int = 1;
    let (one, len) = ((&raw const one).cast(), size_of::<libc::c_int>() as libc::socklen_t);
    let fd = from.as_raw_fd();
    // SAFETY: the option's value is an integer, of which the pointer and the size are given.
    let set = unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY, one, len) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    let mut sent = 0;
    while sent < SENT_BYTES {
        let rest = ptr.wrapping_add(sent).cast();
        // SAFETY: the range is far memory that the case only reads.
        let taken = unsafe { libc::send(fd, rest, SENT_BYTES - sent, libc::MSG_ZEROCOPY) };
        let Ok(taken) = usize::try_from(taken) else { break };
        sent += taken;
    }
    sent
}

fn sockets(name: &'static str, config: RegionConfig) {
    let _watchdog = watchdog(name, LIMIT);
    let Some((far, mine)) = far(config) else { return };
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port of the loopback");
    let address = listener.local_addr().expect("it is bound");
    let step = SENT_BYTES.div_ceil(PAGE);
    let mut streams = Vec::new();
    for first in (0..mine).step_by(step).take(STREAMS) {
        let from = TcpStream::connect(address).expect("somebody listens");
        let (to, _) = listener.accept().expect("somebody connected");
        let sent = resident(&far, first, SENT_BYTES, |ptr| send_zero_copy(&from, ptr));
        assert!(sent > 0, "{}", std::io::Error::last_os_error());
        streams.push((first, sent, from, to));
    }
    far.evict(0..mine);
    use_frames_again(&far, mine);
    for (first, sent, _from, to) in &mut streams {
        let mut bytes = vec![0u8; *sent];
        to.read_exact(&mut bytes).expect("it was sent");
        check_bytes(*first, &bytes, name);
    }
}

/// Chunks are read whole where the limit holds runs of frames.
fn with_chunks(install: Install) -> RegionConfig {
    let config = config(install);
    let limit = config.limit.max(ByteCount::mib(32));
    config.limit(limit).readahead(true)
}

#[test]
fn pipes_of_pages_deliver_what_was_spliced() {
    pipes("pipes of pages", config(Install::Auto));
    pipes("pipes of pages, by copy", config(Install::Copy));
}

#[test]
fn pipes_of_chunks_deliver_what_was_spliced() {
    pipes("pipes of chunks", with_chunks(Install::Auto));
}

/// A run of frames that a direct store has filled keeps its memory for the next use, but not once that has been in the
/// region.
#[test]
fn pipes_of_chunks_that_were_stored_directly_deliver_what_was_spliced() {
    const CHUNK_PAGES: usize = (2 << 20) / PAGE;
    let name = "pipes of chunks that were stored directly";
    let _watchdog = watchdog(name, LIMIT);
    let config = with_chunks(Install::Auto);
    let pages = (config.limit.0 * 2 / 4096) as usize;
    let Some(far) = Far::new(config, pages, 1) else { return };
    let mut chunk = vec![0_u64; CHUNK_PAGES * PAGE / 8];
    for first in (0..pages).step_by(CHUNK_PAGES) {
        for (page, words) in (first..).zip(chunk.chunks_exact_mut(PAGE / 8)) {
            (words[0], words[PAGE / 8 - 1]) = (stamp(page), !stamp(page));
        }
        // SAFETY: mapped, and nobody else uses it.
        if !unsafe { far.region.store_chunk(far.addr(first) as *mut u64, &chunk) } {
            far.fill(first..first + CHUNK_PAGES);
        }
    }
    for round in 0..3 {
        let mut filled = Vec::new();
        for first in (0..pages).step_by(CHUNK_PAGES) {
            far.check(first..first + 8);
            if filled.len() < 2 * STREAMS {
                filled.push((first, splice(&far, first)));
            }
            far.check(first + 8..first + CHUNK_PAGES);
        }
        for (first, (reader, _writer)) in &mut filled {
            let mut bytes = vec![0u8; PIPE_BYTES];
            reader.read_exact(&mut bytes).expect("it holds as much");
            check_bytes(*first, &bytes, &format!("{name}, round {round}"));
        }
    }
    println!("{}", far.stats());
}

#[test]
fn pipes_of_faults_in_thread_deliver_what_was_spliced() {
    pipes("pipes, in-thread", config(Install::Auto).mode(FaultMode::InThread));
}

#[test]
fn sockets_deliver_what_was_sent_without_a_copy() {
    if File::open("/proc/sys/net/ipv4").is_err() {
        println!("skipped: no network");
        return;
    }
    sockets("sockets of pages", config(Install::Auto));
    sockets("sockets of chunks", with_chunks(Install::Auto));
}
