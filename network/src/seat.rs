//! The place of a connection: its owner breaks it, and the server's tender makes it anew.
//!
//! ```text
//!   empty --ask--> asked --seat (tender)--> taken care of: a connection lies there --take (owner)--> empty
//!     ^                                                                                   |
//!     '------------------------------- the connection breaks -----------------------------'
//! ```
//! The tender may wait for a server as long as it likes, and allocates; an owner does neither. So the owner of a broken
//! connection only leaves word that it needs another, and works without one until it finds it in the seat.

#![expect(unsafe_code, reason = "passes descriptors on as numbers")]

use crate::sync::{AtomicBool, AtomicU64, Ordering};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd, RawFd};

/// A connection that is ready for requests.
#[derive(Debug)]
pub(crate) struct Seated {
    pub(crate) fd: OwnedFd,
    /// Replies to reads come in chunks.
    pub(crate) is_chunked: bool,
    /// Number of the server's life that it belongs to.
    pub(crate) life: u32,
}

/// A connection as a word.
///
/// 63 none | 62..33 life | 32 chunked | 31..0 descriptor
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SeatWord(u64);

impl SeatWord {
    const EMPTY: SeatWord = SeatWord(u64::MAX);
    const LIFE_MASK: u32 = (1 << 30) - 1;

    fn new(seated: Seated) -> SeatWord {
        let life = u64::from(seated.life & SeatWord::LIFE_MASK);
        let fd = seated.fd.into_raw_fd() as u32;
        SeatWord(life << 33 | u64::from(seated.is_chunked) << 32 | u64::from(fd))
    }

    fn fd(self) -> Option<RawFd> {
        (self != SeatWord::EMPTY).then_some(self.0 as u32 as RawFd)
    }

    fn seated(self) -> Option<Seated> {
        let fd = self.fd()?;
        Some(Seated {
            // SAFETY: put here by `new`, which gave its descriptor up; the word was taken out of the seat, so that
            // nobody else makes one of it.
            fd: unsafe { OwnedFd::from_raw_fd(fd) },
            is_chunked: self.0 >> 32 & 1 == 1,
            life: (self.0 >> 33) as u32 & SeatWord::LIFE_MASK,
        })
    }
}

/// See [module](self).
#[derive(Debug)]
pub(crate) struct Seat {
    word: AtomicU64,
    is_asked: AtomicBool,
}

impl Seat {
    pub(crate) fn new() -> Seat {
        Seat { word: AtomicU64::new(SeatWord::EMPTY.0), is_asked: AtomicBool::new(false) }
    }

    /// Takes the connection, if one is there.
    pub(crate) fn take(&self) -> Option<Seated> {
        // Relaxed: looked at by each request without a connection; the swap below is what counts.
        if self.word.load(Ordering::Relaxed) == SeatWord::EMPTY.0 {
            return None;
        }
        // Acquire pairs with the Release in `seat`: the handshake is over.
        SeatWord(self.word.swap(SeatWord::EMPTY.0, Ordering::Acquire)).seated()
    }

    /// Asks the tender for a connection; returns whether nobody had yet.
    pub(crate) fn ask(&self) -> bool {
        !self.is_asked.swap(true, Ordering::SeqCst)
    }

    /// True if the owner waits for a connection.
    pub(crate) fn is_asked(&self) -> bool {
        self.is_asked.load(Ordering::SeqCst)
    }

    /// Puts a connection there.
    pub(crate) fn seat(&self, seated: Seated) {
        let before = self.word.swap(SeatWord::new(seated).0, Ordering::Release);
        // Afterwards, or an owner that has just found nothing would ask for a second one. A question that this wipes
        // out, of an owner whose new connection is broken already, is asked again with its next request.
        self.is_asked.store(false, Ordering::SeqCst);
        drop(SeatWord(before).seated());
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        drop(self.take());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_taken_as_it_was_put_and_once() {
        let seat = Seat::new();
        assert!(seat.take().is_none() && seat.ask() && !seat.ask() && seat.is_asked());
        let (one, _other) = std::os::unix::net::UnixStream::pair().expect("a pair");
        seat.seat(Seated { fd: one.into(), is_chunked: true, life: 7 });
        assert!(!seat.is_asked());
        let seated = seat.take().expect("there");
        assert!(seated.is_chunked && seated.life == 7);
        assert!(seat.take().is_none());
    }
}
