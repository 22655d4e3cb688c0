//! A server that sends whatever it likes, at the other end of one connection.
//!
//! A request ends once, what ends it is checked against the request, and nothing is written but the buffers of requests
//! that have not ended. Replies are made as they should be, most of them are then changed, and come in pieces.

#![expect(unsafe_code, reason = "looks at the buffers of requests, and beside them")]

use crate::link::{BufferTable, FlightEnd, Link};
use crate::stream::Connection;
use crate::sys::IoSlice;
use crate::wire::{CHUNK_MAGIC, NbdCommand, REQUEST_LEN, SIMPLE_MAGIC};
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;

/// Inputs of a run. `FARHEAP_NETWORK_REPLIES` is another number of them, `FARHEAP_TEST_SEED` the first one's seed:
/// `FARHEAP_NETWORK_REPLIES=10000000 cargo test --release -p farheap-nbd --lib hostile -- --nocapture`.
const INPUTS: u64 = 20_000;
const DEPTH: usize = 4;
/// More than is received beside the buffers.
const LEN_MAX: usize = 12 << 10;
const PARTS: usize = 3;
/// Bytes around each part of a buffer, which nobody may write.
const GUARD: usize = 64;
const GUARD_BYTE: u8 = 0xee;
const MEMORY_LEN: usize = LEN_MAX + (PARTS + 1) * GUARD;

/// A generator of test decisions (splitmix64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.roll() % bound as u64) as usize
    }
}

/// A request as the server knows it.
#[derive(Clone, Copy, Debug)]
struct Asked {
    command: NbdCommand,
    cookie: u64,
    offset: u64,
    len: usize,
}

/// The memory of a request: parts of its buffer between guards.
struct GuardedBuffer {
    base: *mut u8,
    len: usize,
    parts: [(usize, usize); PARTS],
}

impl GuardedBuffer {
    fn new() -> GuardedBuffer {
        let bytes = vec![GUARD_BYTE; MEMORY_LEN].leak();
        GuardedBuffer { base: bytes.as_mut_ptr(), len: 0, parts: [(0, 0); PARTS] }
    }

    fn bytes(&self) -> Vec<u8> {
        // SAFETY: made by `new` with this length or more and never freed; only this thread uses it.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }.to_vec()
    }

    /// Makes room for a request of this length, in parts of any lengths.
    fn part(&mut self, len: usize, dice: &mut Dice) {
        let mut cuts = [dice.below(len + 1), dice.below(len + 1)];
        cuts.sort_unstable();
        let lens = [cuts[0], cuts[1] - cuts[0], len - cuts[1]];
        let mut at = GUARD;
        for (part, len) in self.parts.iter_mut().zip(lens) {
            *part = (at, len);
            at += len + GUARD;
        }
        self.len = at;
        // SAFETY: as in `bytes`.
        unsafe { std::ptr::write_bytes(self.base, GUARD_BYTE, at) }
    }

    fn slices(&self) -> impl Iterator<Item = IoSlice> {
        let base = self.base;
        self.parts.into_iter().map(move |(at, len)| IoSlice::new(base.wrapping_add(at), len))
    }

    /// Content of the parts, after a look at what is around them.
    fn content(&self) -> Vec<u8> {
        let mut bytes = self.bytes();
        let mut content = Vec::new();
        for (at, len) in self.parts {
            content.extend_from_slice(&bytes[at..at + len]);
            bytes[at..at + len].fill(GUARD_BYTE);
        }
        assert!(bytes.iter().all(|byte| *byte == GUARD_BYTE), "beside the buffers");
        content
    }
}

/// A connection and the server at its other end.
struct Pair {
    link: Link,
    server: UnixStream,
    vectors: BufferTable,
    memory: Vec<GuardedBuffer>,
    asked: Vec<Asked>,
    /// How often each number was used.
    uses: [u64; DEPTH],
    /// One that nobody waits for any more.
    muted: Option<usize>,
    /// How requests ended, and their memory at that time.
    ends: [Option<(FlightEnd, Vec<u8>)>; DEPTH],
}

impl Pair {
    fn new() -> Pair {
        Pair {
            link: Link::new(DEPTH, false),
            server: UnixStream::pair().expect("a pair").0,
            vectors: BufferTable::new(DEPTH, PARTS),
            memory: (0..DEPTH).map(|_| GuardedBuffer::new()).collect(),
            asked: Vec::new(),
            uses: [0; DEPTH],
            muted: None,
            ends: [const { None }; DEPTH],
        }
    }

    fn connect(&mut self, is_chunked: bool) {
        let (ours, server) = UnixStream::pair().expect("a pair");
        ours.set_nonblocking(true).expect("set");
        server.set_nonblocking(true).expect("set");
        self.link.attach(Connection { fd: ours.into(), keys: None }, is_chunked);
        self.server = server;
        self.asked.clear();
        self.muted = None;
        self.ends = [const { None }; DEPTH];
    }

    fn start(&mut self, command: NbdCommand, len: usize, dice: &mut Dice) {
        let index = self.asked.len();
        self.memory[index].part(len, dice);
        self.vectors.set(index, self.memory[index].slices());
        let offset = (dice.below(1 << 20) as u64) << 12;
        self.link.start(index, command, offset, len as u32);
        self.uses[index] += 1;
        let cookie = self.uses[index] << 32 | index as u64;
        self.asked.push(Asked { command, cookie, offset, len });
    }

    /// Sends the requests, and compares what the server gets with them.
    fn send(&mut self) {
        self.link.pump_out(&self.vectors).expect("the server listens");
        let mut bytes = Vec::new();
        let end = self.server.read_to_end(&mut bytes).expect_err("the connection is open");
        assert_eq!(end.kind(), io::ErrorKind::WouldBlock);
        let mut rest = &bytes[..];
        for asked in &self.asked {
            assert_eq!(rest[8..16], asked.cookie.to_be_bytes());
            let data = if asked.command == NbdCommand::Write { asked.len } else { 0 };
            rest = &rest[REQUEST_LEN + data..];
        }
        assert!(rest.is_empty());
    }

    fn pump(&mut self) -> io::Result<()> {
        let Pair { link, vectors, memory, ends, .. } = self;
        let mut done = |index: usize, end| {
            let before = ends[index].replace((end, memory[index].bytes()));
            assert!(before.is_none(), "request {index} ends twice");
        };
        let pumped = link.pump_in(vectors, &mut done);
        if pumped.is_err() {
            link.break_off(&mut done);
        }
        pumped.map(drop)
    }

    /// The server sends, in pieces.
    fn say(&mut self, bytes: &[u8], mut piece: impl FnMut() -> usize) -> io::Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let now;
            (now, rest) = rest.split_at(piece().clamp(1, rest.len()));
            self.server.write_all(now).expect("room in the socket");
            self.pump()?;
        }
        Ok(())
    }

    /// Ends the connection, and looks at every request.
    fn finish(&mut self) {
        let Pair { link, memory, ends, .. } = self;
        link.break_off(&mut |index, end| {
            let before = ends[index].replace((end, memory[index].bytes()));
            assert!(before.is_none(), "request {index} ends twice");
        });
        assert!(link.is_idle() && !link.is_open());
        for (index, asked) in self.asked.iter().enumerate() {
            let (_, bytes) = self.ends[index].as_ref().expect("it has ended");
            let content = self.memory[index].content();
            assert_eq!(*bytes, self.memory[index].bytes(), "written after its end");
            if asked.command != NbdCommand::Read || self.muted == Some(index) {
                assert!(content.iter().all(|byte| *byte == GUARD_BYTE), "nobody reads it");
            }
        }
    }
}

fn simple(errno: u32, cookie: u64) -> Vec<u8> {
    [&SIMPLE_MAGIC.to_be_bytes()[..], &errno.to_be_bytes(), &cookie.to_be_bytes()].concat()
}

fn chunk(flags: u16, kind: u16, cookie: u64, len: u32, payload: &[u8]) -> Vec<u8> {
    let head =
        [CHUNK_MAGIC.to_be_bytes(), (u32::from(flags) << 16 | u32::from(kind)).to_be_bytes()];
    [&head.concat()[..], &cookie.to_be_bytes(), &len.to_be_bytes(), payload].concat()
}

fn data_chunk(flags: u16, cookie: u64, offset: u64, data: &[u8]) -> Vec<u8> {
    chunk(flags, 1, cookie, data.len() as u32 + 8, &[&offset.to_be_bytes()[..], data].concat())
}

/// The bytes that a server has there.
fn held(asked: Asked) -> Vec<u8> {
    (0..asked.len).map(|at| (asked.offset / 4096 + at as u64 / 7) as u8).collect()
}

/// A reply as it should be, one of many forms; a hole is read as zeros. Returns what a read gets by it.
fn right_reply(asked: Asked, is_chunked: bool, dice: &mut Dice) -> (Vec<u8>, Vec<u8>) {
    let Asked { cookie, offset, .. } = asked;
    if asked.command != NbdCommand::Read {
        let is_chunk = is_chunked && dice.below(2) == 0;
        return (
            if is_chunk { chunk(1, 0, cookie, 0, &[]) } else { simple(0, cookie) },
            Vec::new(),
        );
    }
    let mut data = held(asked);
    if !is_chunked {
        return ([&simple(0, cookie)[..], &data].concat(), data);
    }
    let (mut bytes, mut at) = (Vec::new(), 0);
    while at < data.len() {
        let len = (1 + dice.below(data.len())).min(data.len() - at);
        let from = offset + at as u64;
        if dice.below(3) == 0 {
            data[at..at + len].fill(0);
            let payload = [&from.to_be_bytes()[..], &(len as u32).to_be_bytes()].concat();
            bytes.extend(chunk(0, 2, cookie, 12, &payload));
        } else {
            bytes.extend(data_chunk(0, cookie, from, &data[at..at + len]));
        }
        at += len;
    }
    bytes.extend(chunk(1, 0, cookie, 0, &[]));
    (bytes, data)
}

/// Changes a server's bytes; `replies` has where each reply begins.
fn spoil(bytes: &mut Vec<u8>, replies: &[usize], dice: &mut Dice) {
    const NUMBERS: [u32; 10] = [0, 1, 6, 7, 8, 9, 12, 4096, 1 << 31, u32::MAX];
    let reply = replies[dice.below(replies.len())].min(bytes.len());
    let mut near = || (reply + dice.below(32)).min(bytes.len());
    let (at, other) = (near(), near());
    let (from, to) = (at.min(other), at.max(other));
    match dice.below(7) {
        0 if at < bytes.len() => bytes[at] ^= 1 << dice.below(8),
        1 => {
            let at = (reply + dice.below(8) * 4).min(bytes.len());
            let number = NUMBERS[dice.below(NUMBERS.len())].to_be_bytes();
            bytes.iter_mut().skip(at).zip(number).for_each(|(to, from)| *to = from);
        }
        2 => drop(bytes.drain(from..to)),
        3 => {
            let again = bytes[reply..].to_vec();
            let at = if dice.below(2) == 0 { bytes.len() } else { at };
            bytes.splice(at..at, again);
        }
        4 => {
            let len = dice.below(40);
            bytes.splice(at..at, (0..len).map(|_| dice.roll() as u8));
        }
        5 => bytes.truncate(dice.below(bytes.len() + 1)),
        _ => {
            let from = reply + 8;
            let cookie =
                (dice.below(DEPTH + 1) as u64 | dice.below(4) as u64) << (dice.below(2) * 32);
            bytes.iter_mut().skip(from).zip(cookie.to_be_bytes()).for_each(|(to, from)| *to = from);
        }
    }
}

/// One input; returns whether all of the server's bytes were as they should be.
fn input(pair: &mut Pair, dice: &mut Dice) -> bool {
    let is_chunked = dice.below(2) == 0;
    pair.connect(is_chunked);
    for _ in 0..1 + dice.below(DEPTH) {
        let command = [NbdCommand::Read, NbdCommand::Read, NbdCommand::Write, NbdCommand::Trim];
        let most = if dice.below(32) == 0 { LEN_MAX } else { 300 };
        let len = 1 + dice.below(most);
        pair.start(command[dice.below(4)], len, dice);
    }
    let is_sent = dice.below(8) > 0;
    if is_sent {
        pair.send();
    }
    if dice.below(4) == 0 {
        let index = dice.below(pair.asked.len());
        pair.link.mute(index);
        pair.muted = Some(index);
    }
    let (mut bytes, mut replies, mut expected) = (Vec::new(), Vec::new(), Vec::new());
    let first = dice.below(pair.asked.len());
    for n in 0..pair.asked.len() {
        let index = (first + n) % pair.asked.len();
        replies.push(bytes.len());
        let (reply, content) = right_reply(pair.asked[index], is_chunked, dice);
        bytes.extend(reply);
        expected.push((index, content));
    }
    let changes = dice.below(4);
    (0..changes).for_each(|_| spoil(&mut bytes, &replies, dice));
    let piece = [1 << 20, 100.max(bytes.len() / 8), 5000][dice.below(3)];
    let said = pair.say(&bytes, || 1 + dice.below(piece));
    pair.finish();
    if !is_sent {
        assert!(pair.ends.iter().flatten().all(|(end, _)| *end == FlightEnd::Unsent));
        assert!(said.is_err() || bytes.len() < 32, "replies to what was not sent");
    }
    let is_right = is_sent && changes == 0;
    if is_right {
        said.expect("all as it should be");
        for (index, content) in expected {
            let (end, _) = pair.ends[index].as_ref().expect("it has ended");
            assert_eq!(*end, FlightEnd::Done);
            if pair.asked[index].command == NbdCommand::Read && pair.muted != Some(index) {
                assert!(pair.memory[index].content() == content, "other bytes than were sent");
            }
        }
    }
    is_right
}

#[test]
fn no_reply_of_a_hostile_server_writes_beside_a_buffer_or_ends_a_request_twice() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let count = number("FARHEAP_NETWORK_REPLIES").unwrap_or(INPUTS);
    let first = number("FARHEAP_TEST_SEED").unwrap_or_else(|| u64::from(std::process::id()) << 32);
    println!("hostile replies: FARHEAP_TEST_SEED={first}");
    let (mut pair, mut right) = (Pair::new(), 0);
    for seed in first..first + count {
        let run = std::panic::AssertUnwindSafe(|| input(&mut pair, &mut Dice(seed)));
        let result = std::panic::catch_unwind(run);
        right += u64::from(result.unwrap_or_else(|_| panic!("FARHEAP_TEST_SEED={seed}")));
    }
    println!("{count} inputs, {right} of them right");
    assert!(right > count / 8, "{right} of {count} are as they should be");
}

/// Asks for two reads and a write, and lets the server answer; returns how the first read ended.
fn answered(is_chunked: bool, answer: impl Fn(&[Asked]) -> Vec<u8>) -> (io::Result<()>, FlightEnd) {
    let (mut pair, mut dice) = (Pair::new(), Dice(1));
    pair.connect(is_chunked);
    for command in [NbdCommand::Read, NbdCommand::Read, NbdCommand::Write] {
        pair.start(command, 512, &mut dice);
    }
    pair.send();
    let said = pair.say(&answer(&pair.asked.clone()), || usize::MAX);
    pair.finish();
    (said, pair.ends[0].as_ref().expect("ended").0)
}

fn assert_broken(is_chunked: bool, answer: impl Fn(&[Asked]) -> Vec<u8>) {
    let (said, end) = answered(is_chunked, answer);
    assert_eq!(
        (said.map_err(|error| error.kind()), end),
        (Err(io::ErrorKind::InvalidData), FlightEnd::Lost)
    );
}

#[test]
fn lengths_that_cannot_be_end_the_connection() {
    for (kind, len) in [(0, 4), (1, 0), (1, 8), (1, u32::MAX), (2, 8), (2, 16), (1 << 15, 5)] {
        assert_broken(true, |asked| chunk(1, kind, asked[0].cookie, len, &[0; 64]));
    }
    assert_broken(true, |asked| chunk(1, 1 << 15 | 1, asked[0].cookie, u32::MAX, &[0; 64]));
}

#[test]
fn a_cookie_that_no_request_has_ends_the_connection() {
    for change in [DEPTH as u64, 1 << 31, 1 << 32, 1 << 63] {
        assert_broken(false, |asked| simple(5, asked[0].cookie ^ change));
        assert_broken(true, |asked| {
            data_chunk(1, asked[0].cookie ^ change, asked[0].offset, &[0; 512])
        });
    }
}

#[test]
fn a_reply_to_what_was_not_sent_ends_the_connection() {
    let mut pair = Pair::new();
    pair.connect(false);
    pair.start(NbdCommand::Read, 512, &mut Dice(1));
    let reply = [simple(0, pair.asked[0].cookie), vec![7; 512]].concat();
    assert!(pair.say(&reply, || usize::MAX).is_err());
    pair.finish();
    assert_eq!(pair.ends[0].as_ref().expect("ended").0, FlightEnd::Unsent);
}

#[test]
fn a_second_reply_ends_the_connection_and_not_its_request_again() {
    let (said, end) = answered(false, |asked| {
        let reply = [simple(0, asked[0].cookie), held(asked[0])].concat();
        [&reply[..], &reply].concat()
    });
    assert!(said.is_err() && end == FlightEnd::Done);
    let (said, end) = answered(true, |asked| {
        let reply = data_chunk(1, asked[0].cookie, asked[0].offset, &held(asked[0]));
        [&reply[..], &reply].concat()
    });
    assert!(said.is_err() && end == FlightEnd::Done);
}

#[test]
fn data_that_was_not_asked_for_ends_the_connection() {
    let longer = |flags, asked: Asked| data_chunk(flags, asked.cookie, asked.offset, &[7; 513]);
    assert_broken(true, |asked| longer(1, asked[0]));
    assert_broken(true, |asked| longer(0, asked[0]));
    assert_broken(true, |asked| {
        let Asked { cookie, offset, .. } = asked[0];
        [data_chunk(0, cookie, offset, &[7; 512]), data_chunk(1, cookie, offset + 512, &[7])]
            .concat()
    });
    assert_broken(true, |asked| data_chunk(1, asked[0].cookie, asked[0].offset - 1, &[7; 512]));
    assert_broken(true, |asked| data_chunk(1, asked[2].cookie, asked[2].offset, &[7; 512]));
    assert_broken(false, |asked| data_chunk(1, asked[0].cookie, asked[0].offset, &[7; 512]));
    // Without chunks a reply has no length: what is too much is no reply.
    let (said, end) = answered(false, |asked| [simple(0, asked[0].cookie), vec![7; 600]].concat());
    assert!(said.is_err() && end == FlightEnd::Done);
}
