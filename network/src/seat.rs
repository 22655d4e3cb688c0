//! The place of a connection: its owner breaks it, and the server's tender makes it anew.
//!
//! ```text
//!   empty --ask--> asked --seat (tender)--> taken care of: a connection lies there --take (owner)--> empty
//!     ^                                                                                   |
//!     '------------------------------- the connection breaks -----------------------------'
//! ```
//! The tender may wait for a server as long as it likes, and allocates; an owner does neither. So the owner of a broken
//! connection only leaves word that it needs another, and works without one until it finds it in the seat.

use crate::stream::Connection;
use crate::sync::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// A connection that is ready for requests.
#[derive(Debug)]
pub(crate) struct Seated {
    pub(crate) connection: Connection,
    /// Replies to reads come in chunks.
    pub(crate) is_chunked: bool,
    /// Number of the server's life that it belongs to.
    pub(crate) life: u32,
}

/// See [module](self).
#[derive(Debug, Default)]
pub(crate) struct Seat {
    seated: Mutex<Option<Seated>>,
    is_asked: AtomicBool,
}

impl Seat {
    /// Takes the connection, if one is there. Never waits: while the tender puts one there, there is none yet.
    pub(crate) fn take(&self) -> Option<Seated> {
        self.seated.try_lock().ok()?.take()
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
        let before = self.seated.lock().unwrap_or_else(PoisonError::into_inner).replace(seated);
        // Afterwards, or an owner that has just found nothing would ask for a second one. A question that this wipes
        // out, of an owner whose new connection is broken already, is asked again with its next request.
        self.is_asked.store(false, Ordering::SeqCst);
        drop(before);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_taken_as_it_was_put_and_once() {
        let seat = Seat::default();
        assert!(seat.take().is_none() && seat.ask() && !seat.ask() && seat.is_asked());
        let (one, _other) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let connection = Connection { fd: one.into(), keys: None };
        seat.seat(Seated { connection, is_chunked: true, life: 7 });
        assert!(!seat.is_asked());
        let seated = seat.take().expect("there");
        assert!(seated.is_chunked && seated.life == 7);
        assert!(seat.take().is_none());
    }
}
