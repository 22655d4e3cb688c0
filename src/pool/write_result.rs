//! What became of pages that were to be written.

use crate::base::error::Error;
use crate::base::units::{PageCount, PageId};

/// Counts of a group of pages, or of several groups.
#[derive(Default)]
pub(super) struct WriteResult {
    pub(super) written: u64,
    /// By the device.
    pub(super) failed: u64,
    refused: u64,
    /// The first that the log refused, and why.
    first: Option<(PageId, Error)>,
}

impl WriteResult {
    /// The log refused a page.
    pub(super) fn refuse(&mut self, page: PageId, reason: Error) {
        self.refused += 1;
        self.first.get_or_insert((page, reason));
    }

    /// Adds the result of a later group.
    pub(super) fn add(&mut self, later: WriteResult) {
        self.written += later.written;
        self.failed += later.failed;
        self.refused += later.refused;
        self.first = self.first.take().or(later.first);
    }

    /// The error of pages that were refused, if there were any.
    pub(super) fn into_refusal(self) -> Option<Error> {
        let (first, reason) = self.first?;
        let reason = reason.to_string();
        Some(Error::WriteRefused { pages: PageCount(self.refused), first, reason })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_of_all_groups_count_and_the_first_is_named() {
        let (mut all, mut later) = (WriteResult::default(), WriteResult::default());
        assert_eq!(WriteResult::default().into_refusal(), None);
        later.refuse(PageId(7), Error::NotRunning);
        later.refuse(PageId(8), Error::AlreadyRunning);
        all.add(WriteResult { written: 3, failed: 1, ..WriteResult::default() });
        all.add(later);
        let mut last = WriteResult { written: 2, ..WriteResult::default() };
        last.refuse(PageId(9), Error::AlreadyRunning);
        all.add(last);
        assert_eq!((all.written, all.failed), (5, 1));
        let reason = Error::NotRunning.to_string();
        let expected = Error::WriteRefused { pages: PageCount(3), first: PageId(7), reason };
        assert_eq!(all.into_refusal(), Some(expected));
    }
}
