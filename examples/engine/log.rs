//! The log: records one after the other, each with a sum that goes on from the record before.
//!
//! ```text
//! file:    header 0 | header 1 | record | record | ...       headers begin at 0 and 4096, records at 8192
//! header:  magic 8 | epoch 8 | root 8 | sum 8
//! record:  sum 8 | length of the body 4 | kind 1 | body
//! ```
//! An epoch begins with a checkpoint: its header overwrites the older of the two, and its records those
//! of the epoch before, which are not needed any more. A sum is over the record and the sum before it,
//! the header's for the first. So reading ends at the first record that was not written whole, and
//! nothing that an earlier epoch, or a write that was cut off, left behind it is ever taken for a record.

use super::Result;
use farheap::PageId;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Where a log is kept.
pub(crate) trait Medium: Send {
    /// Reads bytes; behind the end of what was written there are zeros.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;
    /// Writes bytes, which may reach the device in parts, and in any order, until `sync` returns.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Waits until the device has what was written.
    fn sync(&self) -> io::Result<()>;
}

impl Medium for File {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let mut filled = 0;
        while filled < into.len() {
            match FileExt::read_at(self, &mut into[filled..], offset + filled as u64)? {
                0 => break,
                read => filled += read,
            }
        }
        into[filled..].fill(0);
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }
}

/// Keys with their new values; `None`: the key goes.
pub(crate) type Changes = BTreeMap<Vec<u8>, Option<Vec<u8>>>;

/// A record.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Record<'r> {
    /// A transaction that was committed.
    Commit(Changes),
    /// A page as a checkpoint is about to write it.
    Image(PageId, &'r [u8]),
    /// All pages of the checkpoint are in the log. These ranges of pages are in use.
    Checkpoint(Vec<(u64, u64)>),
}

const MAGIC: u64 = u64::from_le_bytes(*b"farheng1");
const HEADER: usize = 32;
const HEADERS_APART: u64 = 4096;
const RECORDS_AT: u64 = 2 * HEADERS_APART;
const RECORD_HEAD: usize = 13;
/// A longer body is none: what was read is no record.
const BODY_MAX: usize = 16 << 20;

/// A log with the place where the next record goes.
pub(crate) struct Log {
    medium: Box<dyn Medium>,
    epoch: u64,
    root: PageId,
    at: u64,
    /// The sum of the record before.
    sum: u64,
}

fn sum(before: u64, bytes: &[u8]) -> u64 {
    twox_hash::XxHash3_128::oneshot_with_seed(before, bytes) as u64
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"))
}

/// Takes bytes from the front.
fn take<'b>(bytes: &mut &'b [u8], len: usize) -> Option<&'b [u8]> {
    let (taken, rest) = bytes.split_at_checked(len)?;
    *bytes = rest;
    Some(taken)
}

/// Takes bytes that are preceded by their number.
fn take_sized<'b>(bytes: &mut &'b [u8]) -> Option<&'b [u8]> {
    let len = number(take(bytes, 8)?);
    take(bytes, len as usize)
}

fn put_sized(bytes: &mut Vec<u8>, part: &[u8]) {
    bytes.extend((part.len() as u64).to_le_bytes());
    bytes.extend(part);
}

impl Record<'_> {
    fn encode(&self) -> Vec<u8> {
        let (kind, mut body) = match self {
            Record::Commit(changes) => (1, encode_changes(changes)),
            Record::Image(page, bytes) => (2, [&page.0.to_le_bytes()[..], bytes].concat()),
            Record::Checkpoint(in_use) => {
                let ends = in_use.iter().flat_map(|(first, end)| [*first, *end]);
                (3, ends.flat_map(u64::to_le_bytes).collect())
            }
        };
        let mut record = (body.len() as u32).to_le_bytes().to_vec();
        record.push(kind);
        record.append(&mut body);
        record
    }

    fn decode(kind: u8, body: &[u8]) -> Option<Record<'_>> {
        match kind {
            1 => decode_changes(body).map(Record::Commit),
            2 => Some(Record::Image(PageId(number(body.get(..8)?)), &body[8..])),
            3 => {
                let ends = body.chunks_exact(16).map(|both| (number(both), number(&both[8..])));
                Some(Record::Checkpoint(ends.collect()))
            }
            _ => None,
        }
    }
}

fn encode_changes(changes: &Changes) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (key, value) in changes {
        put_sized(&mut bytes, key);
        bytes.push(u8::from(value.is_some()));
        put_sized(&mut bytes, value.as_deref().unwrap_or_default());
    }
    bytes
}

fn decode_changes(mut bytes: &[u8]) -> Option<Changes> {
    let mut changes = Changes::new();
    while !bytes.is_empty() {
        let key = take_sized(&mut bytes)?.to_vec();
        let is_some = take(&mut bytes, 1)? == [1];
        let value = take_sized(&mut bytes)?.to_vec();
        changes.insert(key, is_some.then_some(value));
    }
    Some(changes)
}

impl Log {
    /// Opens a log. The medium comes back if no log ever began there.
    pub(crate) fn open(medium: Box<dyn Medium>) -> Result<Result<Log, Box<dyn Medium>>> {
        let mut newest: Option<[u64; 3]> = None;
        for place in [0, HEADERS_APART] {
            let mut header = [0; HEADER];
            medium.read_at(place, &mut header)?;
            let [magic, epoch, root, its_sum] = [0, 8, 16, 24].map(|at| number(&header[at..]));
            let is_whole = magic == MAGIC && sum(0, &header[..24]) == its_sum;
            if is_whole && newest.is_none_or(|newest| newest[0] < epoch) {
                newest = Some([epoch, root, its_sum]);
            }
        }
        Ok(match newest {
            Some([epoch, root, sum]) => {
                Ok(Log { medium, epoch, root: PageId(root), at: RECORDS_AT, sum })
            }
            None => Err(medium),
        })
    }

    /// Begins a log of a store whose tree has this root.
    pub(crate) fn create(medium: Box<dyn Medium>, root: PageId) -> Result<Log> {
        let mut log = Log { medium, epoch: 0, root, at: RECORDS_AT, sum: 0 };
        log.begin_epoch()?;
        Ok(log)
    }

    /// The root of the tree.
    pub(crate) fn root(&self) -> PageId {
        self.root
    }

    /// Forgets all records: the table has what they say.
    pub(crate) fn begin_epoch(&mut self) -> Result<()> {
        self.epoch += 1;
        let words = [MAGIC, self.epoch, self.root.0];
        let mut header: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
        self.sum = sum(0, &header);
        header.extend(self.sum.to_le_bytes());
        self.at = RECORDS_AT;
        // The other header counts until this one is whole.
        self.medium.write_at(self.epoch % 2 * HEADERS_APART, &header)?;
        Ok(self.medium.sync()?)
    }

    /// Reads the records from the first on, and calls `each` for each. What is appended next follows
    /// the last of them.
    pub(crate) fn read(&mut self, mut each: impl FnMut(Record<'_>) -> Result<()>) -> Result<()> {
        let mut body = Vec::new();
        loop {
            let mut head = [0; RECORD_HEAD];
            self.medium.read_at(self.at, &mut head)?;
            let len = u32::from_le_bytes(head[8..12].try_into().expect("four bytes")) as usize;
            if len > BODY_MAX {
                return Ok(());
            }
            body.clear();
            body.extend(&head[8..]);
            body.resize(RECORD_HEAD - 8 + len, 0);
            self.medium.read_at(self.at + RECORD_HEAD as u64, &mut body[RECORD_HEAD - 8..])?;
            if sum(self.sum, &body) != number(&head) {
                return Ok(());
            }
            let record = Record::decode(head[12], &body[RECORD_HEAD - 8..]);
            each(record.ok_or("the log has a record of another version")?)?;
            self.sum = number(&head);
            self.at += (RECORD_HEAD + len) as u64;
        }
    }

    /// Goes back to the first record, to read all again.
    pub(crate) fn rewind(&mut self) -> Result<()> {
        let mut header = [0; HEADER];
        self.medium.read_at(self.epoch % 2 * HEADERS_APART, &mut header)?;
        (self.at, self.sum) = (RECORDS_AT, number(&header[24..]));
        Ok(())
    }

    /// Appends a record, which is durable after the next [`sync`](Log::sync).
    pub(crate) fn append(&mut self, record: &Record<'_>) -> Result<()> {
        let record = record.encode();
        if record.len() > BODY_MAX {
            return Err("the transaction is too long for the log".into());
        }
        let sum = sum(self.sum, &record);
        let bytes = [&sum.to_le_bytes()[..], &record].concat();
        self.medium.write_at(self.at, &bytes)?;
        (self.at, self.sum) = (self.at + bytes.len() as u64, sum);
        Ok(())
    }

    /// Waits until all records are durable.
    pub(crate) fn sync(&self) -> Result<()> {
        Ok(self.medium.sync()?)
    }
}
