//! Streams: reads of pages that lie in order, as those of a scan, of which what follows is read ahead.
//!
//! Without it a scan waits for the device at each page: 57 s for 450 MB on a loaded machine, where the kernel, which reads
//! files ahead, took 4.

use std::ops::Range;

/// Streams that are followed at once.
const STREAMS: usize = 8;
/// Reads in order after which a stream is believed.
const RUN: u64 = 4;
/// Maximum number of pages by which a read may skip in a stream: inner nodes lie between leaves.
const SKIP: u64 = 4;
/// Pages that are read ahead at once, when half of them have been read.
const AHEAD: u64 = 64;

/// One of them; the default has read nothing, and is taken for pages up to [`SKIP`] as a new one is.
#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    /// The page that would continue it.
    next: u64,
    /// Reads so far.
    run: u64,
    /// The first page that has not been asked for.
    ahead: u64,
    /// When it was read last.
    time: u64,
}

/// The streams of a database.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    streams: [Stream; STREAMS],
    /// Reads so far.
    time: u64,
}

impl Streams {
    /// Notes a read of pages; returns those that should be read ahead, if there are any.
    pub(crate) fn note(&mut self, pages: Range<u64>) -> Option<Range<u64>> {
        let (start, next) = (pages.start, pages.end);
        let continues = |stream: &&mut Stream| (stream.next..=stream.next + SKIP).contains(&start);
        self.time += 1;
        let Some(stream) = self.streams.iter_mut().find(continues) else {
            let oldest = self.streams.iter_mut().min_by_key(|stream| stream.time);
            let oldest = oldest.expect("there are some");
            *oldest = Stream { next, run: 1, ahead: next, time: self.time };
            return None;
        };
        stream.time = self.time;
        stream.next = next;
        stream.run += 1;
        stream.ahead = stream.ahead.max(next);
        if stream.run < RUN || stream.ahead - next > AHEAD / 2 {
            return None;
        }
        let from = std::mem::replace(&mut stream.ahead, next + AHEAD);
        Some(from..stream.ahead)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_read_ahead_once_and_to_its_end() {
        let mut streams = Streams::default();
        let mut asked = Vec::new();
        for page in 100..300 {
            // Reads without order beside it.
            assert_eq!(streams.note(page * 1000..page * 1000 + 1), None);
            asked.extend(streams.note(page..page + 1).into_iter().flatten());
        }
        assert_eq!(asked, (104..104 + asked.len() as u64).collect::<Vec<_>>());
        assert!(asked.len() as u64 > 200 - 4 && (asked.len() as u64) < 200 + AHEAD, "{asked:?}");
    }

    #[test]
    fn a_stream_may_skip_pages_that_are_not_read() {
        let mut streams = Streams::default();
        let asked = (0..100).filter_map(|at| streams.note(10 + 3 * at..11 + 3 * at)).count();
        assert!(asked >= 300 / AHEAD as usize, "{asked}");
        assert_eq!(streams.note(10..11), None, "and does not go back");
    }
}
