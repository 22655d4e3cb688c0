//! The protocol's numbers, requests as bytes, and bytes as replies: nothing here waits, allocates or calls the kernel.
//!
//! A server's bytes are never trusted. [`parse_reply`] reads the head of a reply, and [`Exchange::accept`] compares it
//! with the request that it is for: a length, an offset or a cookie that does not fit ends the connection, because
//! nobody knows any more where the next reply begins.
//!
//! ```text
//!   bytes --parse_reply--> ReplyHead --accept (by its cookie)--> Body: bytes of a buffer, zeros, or to be skipped
//!                                                    '--> the request's end, when all of its bytes are there
//! ```

use std::fmt;

/// Bytes of a request's head.
pub(crate) const REQUEST_LEN: usize = 28;
/// Maximum number of bytes of a reply's head.
pub const REPLY_LEN_MAX: usize = 32;
/// Maximum number of bytes of a message that explains an error, which nobody reads.
const EXPLANATION_MAX: u32 = 64 << 10;

const REQUEST_MAGIC: u32 = 0x2560_9513;
pub(crate) const SIMPLE_MAGIC: u32 = 0x6744_6698;
pub(crate) const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Of a chunk: it is the reply's last.
const CHUNK_DONE: u16 = 1;
const CHUNK_NONE: u16 = 0;
const CHUNK_DATA: u16 = 1;
const CHUNK_HOLE: u16 = 2;
/// Chunks with this bit are errors, known or not.
const CHUNK_ERROR: u16 = 1 << 15;

/// A request's kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum NbdCommand {
    /// Server to memory.
    Read = 0,
    /// Memory to server.
    Write = 1,
    /// The connection ends.
    Disconnect = 2,
    /// Written bytes are to outlive the server's power.
    Flush = 3,
    /// The bytes of a range are not needed any more.
    Trim = 4,
}

/// A request's head as bytes.
pub(crate) fn request(
    command: NbdCommand,
    cookie: u64,
    offset: u64,
    len: u32,
) -> [u8; REQUEST_LEN] {
    let mut bytes = [0; REQUEST_LEN];
    bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    bytes[6..8].copy_from_slice(&(command as u16).to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..24].copy_from_slice(&offset.to_be_bytes());
    bytes[24..].copy_from_slice(&len.to_be_bytes());
    bytes
}

/// A breach of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "broke the protocol: {}", self.0)
    }
}

/// The head of a reply, or of a chunk of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyHead {
    cookie: u64,
    content: ReplyContent,
    /// No chunk follows.
    is_last: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReplyContent {
    /// A reply without chunks; 0: no error.
    Simple {
        errno: u32,
    },
    Nothing,
    Data {
        offset: u64,
        len: u32,
    },
    Hole {
        offset: u64,
        len: u32,
    },
    /// `rest` bytes of explanation follow.
    Failure {
        errno: u32,
        rest: u32,
    },
}

impl ReplyHead {
    /// Name of the request that it is for.
    #[must_use]
    pub fn cookie(&self) -> u64 {
        self.cookie
    }
}

/// The bytes that follow a reply's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// None.
    Nothing,
    /// Bytes of the request's buffer.
    Data {
        /// Where they begin in the buffer.
        at: u32,
        /// Number of them.
        len: u32,
    },
    /// None, and bytes of the request's buffer are zeros.
    Zeros {
        /// Where they begin in the buffer.
        at: u32,
        /// Number of them.
        len: u32,
    },
    /// Bytes that nobody needs.
    Skipped(u32),
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from(be32(bytes, at)) << 32 | u64::from(be32(bytes, at + 4))
}

/// Reads the head of a reply from the start of `bytes`; returns it with its length, or `None` while bytes of it are
/// missing. No head is longer than [`REPLY_LEN_MAX`].
///
/// # Errors
/// When it is none.
pub fn parse_reply(bytes: &[u8]) -> Result<Option<(ReplyHead, usize)>, Malformed> {
    if bytes.len() < 4 {
        return Ok(None);
    }
    match be32(bytes, 0) {
        SIMPLE_MAGIC if bytes.len() < 16 => Ok(None),
        SIMPLE_MAGIC => {
            let content = ReplyContent::Simple { errno: be32(bytes, 4) };
            Ok(Some((ReplyHead { cookie: be64(bytes, 8), content, is_last: true }, 16)))
        }
        CHUNK_MAGIC if bytes.len() < 20 => Ok(None),
        CHUNK_MAGIC => parse_chunk(bytes),
        _ => Err(Malformed("not a reply")),
    }
}

/// Reads the head of a chunk and the fixed part of its payload.
fn parse_chunk(bytes: &[u8]) -> Result<Option<(ReplyHead, usize)>, Malformed> {
    let (flags, kind, len) = (be16(bytes, 4), be16(bytes, 6), be32(bytes, 16));
    let fixed = match kind {
        CHUNK_NONE if len == 0 => 0,
        CHUNK_DATA if len > 8 => 8,
        CHUNK_HOLE if len == 12 => 12,
        // An error and the length of its explanation.
        _ if kind & CHUNK_ERROR != 0 && (6..=EXPLANATION_MAX).contains(&len) => 6,
        _ => return Err(Malformed("a chunk of unknown kind or impossible length")),
    };
    if bytes.len() < 20 + fixed {
        return Ok(None);
    }
    let content = match kind {
        CHUNK_NONE => ReplyContent::Nothing,
        CHUNK_DATA => ReplyContent::Data { offset: be64(bytes, 20), len: len - 8 },
        CHUNK_HOLE => ReplyContent::Hole { offset: be64(bytes, 20), len: be32(bytes, 28) },
        _ => ReplyContent::Failure { errno: be32(bytes, 20), rest: len - 6 },
    };
    let is_last = flags & CHUNK_DONE != 0;
    if kind == CHUNK_NONE && !is_last {
        return Err(Malformed("an empty chunk that is not the last"));
    }
    Ok(Some((ReplyHead { cookie: be64(bytes, 8), content, is_last }, 20 + fixed)))
}

/// A request that was sent, and how much of its reply there is.
///
/// # Examples
/// ```
/// use farheap_nbd::wire::{NbdCommand, Exchange, parse_reply};
///
/// let mut read = Exchange::new(NbdCommand::Read, 4096, 8192, true);
/// let not_a_reply = [7; 32];
/// assert!(parse_reply(&not_a_reply).is_err());
/// assert!(read.outcome().is_none());
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Exchange {
    command: NbdCommand,
    offset: u64,
    len: u32,
    /// Replies to reads come in chunks.
    is_chunked: bool,
    received: u32,
    /// The first error; 0 for none.
    errno: u32,
    is_over: bool,
}

impl Exchange {
    /// A request for `len` bytes at `offset`, sent on a connection whose replies are chunked or not.
    #[must_use]
    pub fn new(command: NbdCommand, offset: u64, len: u32, is_chunked: bool) -> Exchange {
        Exchange { command, offset, len, is_chunked, received: 0, errno: 0, is_over: false }
    }

    /// The request's kind.
    #[must_use]
    pub fn command(&self) -> NbdCommand {
        self.command
    }

    /// Takes a head whose cookie is the request's; returns the bytes that follow it. Data comes in the order of its
    /// offsets, each byte once, which the protocol recommends and all servers do: so a reply that is complete has filled
    /// the buffer.
    ///
    /// # Errors
    /// When it is no reply to this request.
    pub fn accept(&mut self, head: &ReplyHead) -> Result<Body, Malformed> {
        let is_read = self.command == NbdCommand::Read;
        let body = match head.content {
            ReplyContent::Simple { errno: 0 } if is_read && self.is_chunked => {
                return Err(Malformed("a read answered without chunks"));
            }
            ReplyContent::Simple { .. } | ReplyContent::Failure { .. } if self.is_over => {
                return Err(Malformed("a second reply"));
            }
            ReplyContent::Simple { errno: 0 } if is_read => {
                self.received = self.len;
                Body::Data { at: 0, len: self.len }
            }
            ReplyContent::Simple { errno } => {
                self.errno = errno;
                Body::Nothing
            }
            ReplyContent::Failure { errno: 0, .. } => {
                return Err(Malformed("an error without number"));
            }
            ReplyContent::Failure { errno, rest } => {
                self.errno = if self.errno == 0 { errno } else { self.errno };
                Body::Skipped(rest)
            }
            ReplyContent::Nothing => Body::Nothing,
            ReplyContent::Data { offset, len } => {
                Body::Data { at: self.take(is_read, offset, len)?, len }
            }
            ReplyContent::Hole { offset, len } => {
                Body::Zeros { at: self.take(is_read, offset, len)?, len }
            }
        };
        if head.is_last {
            if is_read && self.errno == 0 && self.received != self.len {
                return Err(Malformed("a read answered in part"));
            }
            self.is_over = true;
        }
        Ok(body)
    }

    /// Takes data of a read; returns where it belongs in the buffer.
    fn take(&mut self, is_read: bool, offset: u64, len: u32) -> Result<u32, Malformed> {
        let at = self.received;
        let fits = len > 0 && len <= self.len - at;
        if !is_read || !self.is_chunked || !fits || offset != self.offset + u64::from(at) {
            return Err(Malformed("data that was not asked for"));
        }
        self.received += len;
        Ok(at)
    }

    /// The result, once the last head and what follows it is there: 0, or an error of the server's as Linux numbers it.
    #[must_use]
    pub fn outcome(&self) -> Option<i32> {
        const KNOWN: [i32; 8] = [
            libc::EPERM,
            libc::EIO,
            libc::ENOMEM,
            libc::EINVAL,
            libc::ENOSPC,
            libc::EOVERFLOW,
            libc::EOPNOTSUPP,
            libc::ESHUTDOWN,
        ];
        let errno = i32::try_from(self.errno).unwrap_or(libc::EIO);
        let known = if errno == 0 || KNOWN.contains(&errno) { errno } else { libc::EIO };
        self.is_over.then_some(known)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn chunk(flags: u16, kind: u16, cookie: u64, payload: &[u8]) -> Vec<u8> {
        let mut bytes = CHUNK_MAGIC.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend((payload.len() as u32).to_be_bytes());
        bytes.extend(payload);
        bytes
    }

    fn simple(errno: u32, cookie: u64) -> Vec<u8> {
        [&SIMPLE_MAGIC.to_be_bytes()[..], &errno.to_be_bytes(), &cookie.to_be_bytes()].concat()
    }

    fn head(bytes: &[u8]) -> ReplyHead {
        parse_reply(bytes).expect("a reply").expect("all of it").0
    }

    #[test]
    fn a_request_is_28_bytes_in_network_order() {
        let bytes = request(NbdCommand::Write, 0x0102_0304_0506_0708, 0x1000, 0x2000);
        let expected = [
            0x25, 0x60, 0x95, 0x13, 0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0x10, 0,
            0, 0, 0x20, 0,
        ];
        assert_eq!(bytes, expected);
    }

    #[test]
    fn a_head_is_complete_with_its_last_byte_only() {
        let data = chunk(CHUNK_DONE, CHUNK_DATA, 9, &[[0; 8], [7; 8]].concat());
        for bytes in [&simple(5, 9)[..], &data[..28]] {
            for len in 0..bytes.len() {
                assert_eq!(parse_reply(&bytes[..len]), Ok(None));
            }
            let (head, len) = parse_reply(bytes).expect("a reply").expect("complete");
            assert_eq!((head.cookie, len), (9, bytes.len()));
        }
    }

    #[test]
    fn a_read_in_chunks_is_over_when_all_of_its_bytes_have_come_in_order() {
        let mut read = Exchange::new(NbdCommand::Read, 4096, 24, true);
        let data = chunk(0, CHUNK_DATA, 1, &[&4096_u64.to_be_bytes()[..], &[1; 8]].concat());
        assert_eq!(read.accept(&head(&data)), Ok(Body::Data { at: 0, len: 8 }));
        let hole =
            chunk(0, CHUNK_HOLE, 1, &[&4104_u64.to_be_bytes()[..], &16_u32.to_be_bytes()].concat());
        assert_eq!(read.accept(&head(&hole)), Ok(Body::Zeros { at: 8, len: 16 }));
        assert_eq!(read.outcome(), None);
        assert_eq!(read.accept(&head(&chunk(CHUNK_DONE, CHUNK_NONE, 1, &[]))), Ok(Body::Nothing));
        assert_eq!(read.outcome(), Some(0));
    }

    #[test]
    fn what_does_not_fit_the_request_is_refused() {
        let data = |offset: u64, len: usize| {
            chunk(CHUNK_DONE, CHUNK_DATA, 1, &[&offset.to_be_bytes()[..], &vec![1; len]].concat())
        };
        let refused = |command, is_chunked, bytes: &[u8]| {
            Exchange::new(command, 4096, 16, is_chunked).accept(&head(bytes)).is_err()
        };
        assert!(refused(NbdCommand::Read, true, &data(4096, 24)), "too long");
        assert!(refused(NbdCommand::Read, true, &data(4096, 8)), "too short");
        assert!(refused(NbdCommand::Read, true, &data(4104, 8)), "elsewhere");
        assert!(refused(NbdCommand::Read, true, &data(u64::MAX, 16)), "far elsewhere");
        assert!(refused(NbdCommand::Write, true, &data(4096, 16)), "data for a write");
        assert!(refused(NbdCommand::Read, false, &data(4096, 16)), "chunks were not agreed on");
        assert!(refused(NbdCommand::Read, true, &simple(0, 1)), "chunks were agreed on");
        assert!(refused(NbdCommand::Read, true, &chunk(CHUNK_DONE, CHUNK_NONE, 1, &[])), "nothing");
        assert!(parse_reply(&chunk(0, CHUNK_NONE, 1, &[])).is_err());
        assert!(parse_reply(&chunk(CHUNK_DONE, 77, 1, &[])).is_err());
    }

    #[test]
    fn an_error_in_the_middle_of_a_read_ends_it_with_that_error() {
        let mut read = Exchange::new(NbdCommand::Read, 0, 16, true);
        let failure = [&5_u32.to_be_bytes()[..], &3_u16.to_be_bytes(), b"bad"].concat();
        let failure = chunk(0, CHUNK_ERROR | 1, 1, &failure);
        assert_eq!(read.accept(&head(&failure)), Ok(Body::Skipped(3)));
        assert_eq!(read.accept(&head(&chunk(CHUNK_DONE, CHUNK_NONE, 1, &[]))), Ok(Body::Nothing));
        assert_eq!(read.outcome(), Some(libc::EIO));
        let mut write = Exchange::new(NbdCommand::Write, 0, 16, false);
        assert_eq!(write.accept(&head(&simple(28, 1))), Ok(Body::Nothing));
        assert_eq!(write.outcome(), Some(libc::ENOSPC));
        let mut strange = Exchange::new(NbdCommand::Write, 0, 16, false);
        assert_eq!(strange.accept(&head(&simple(u32::MAX, 1))), Ok(Body::Nothing));
        assert_eq!(strange.outcome(), Some(libc::EIO));
    }

    proptest! {
        #[test]
        fn no_bytes_of_a_server_lead_out_of_the_buffer(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            kind in 0_u16..4,
            is_simple: bool,
            offset in 0_u64..64,
            len in 1_u32..64,
        ) {
            // A right beginning, or the rest is rarely reached.
            let mut bytes = bytes;
            if bytes.len() >= 20 {
                let magic = if is_simple { SIMPLE_MAGIC } else { CHUNK_MAGIC };
                bytes[..4].copy_from_slice(&magic.to_be_bytes());
                bytes[6..8].copy_from_slice(&kind.to_be_bytes());
                bytes[16..19].fill(0);
            }
            let mut read = Exchange::new(NbdCommand::Read, offset, len, !is_simple);
            if let Ok(Some((head, used))) = parse_reply(&bytes) {
                prop_assert!(used <= bytes.len() && used <= REPLY_LEN_MAX);
                if let Ok(Body::Data { at, len: part } | Body::Zeros { at, len: part }) = read.accept(&head) {
                    prop_assert!(u64::from(at) + u64::from(part) <= u64::from(len));
                }
            }
        }
    }
}
