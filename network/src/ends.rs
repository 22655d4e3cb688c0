//! Requests as their users see them: buffers, and ends.

/// Maximum number of servers of a client.
pub const SERVERS_MAX: usize = 8;

/// A buffer of a request.
#[derive(Clone, Copy, Debug)]
pub struct NbdBuffer {
    /// Its start.
    pub ptr: *mut u8,
    /// Bytes.
    pub len: usize,
}

/// End of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// All bytes were moved.
    Done,
    /// Nothing is under way any more. An error as Linux numbers it.
    Failed(i32),
    /// No server has the bytes, and one may still write them: the place must not be used again.
    Late,
    /// Nothing was sent, for an earlier write may still reach the place: it must not be used again, and others can be.
    Barred,
}

impl Ending {
    /// The error, with `late` for one that may be carried out all the same, and `barred` for one whose place is to be
    /// another; `None`: it was done.
    #[must_use]
    pub fn errno(self, late: i32, barred: i32) -> Option<i32> {
        match self {
            Ending::Done => None,
            Ending::Failed(errno) => Some(errno),
            Ending::Late => Some(late),
            Ending::Barred => Some(barred),
        }
    }
}

/// A request that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NbdEnd {
    /// Its name.
    pub token: u64,
    /// It was a read.
    pub is_read: bool,
    /// Its first byte on the export.
    pub offset: u64,
    /// Its bytes.
    pub len: u32,
    /// How it ended.
    pub ending: Ending,
}

/// Fills places of ends that there are not yet.
pub(crate) const IDLE_END: NbdEnd =
    NbdEnd { token: 0, is_read: true, offset: 0, len: 0, ending: Ending::Done };
