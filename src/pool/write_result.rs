//! Outcomes of writes.

use crate::base::error::Error;
use crate::base::units::PageId;
use std::path::Path;

/// Counts of a group of pages, or of several groups.
#[derive(Default)]
pub(super) struct WriteResult {
    pub(super) written: u64,
    /// Why the device did not take some, the first time.
    pub(super) failure: Option<Error>,
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
        self.failure = self.failure.take().or(later.failure);
        self.refused += later.refused;
        self.first = self.first.take().or(later.first);
    }

    /// Why a page was not written.
    pub(super) fn trouble(&self) -> Option<&Error> {
        self.failure.as_ref().or(self.first.as_ref().map(|(_, reason)| reason))
    }

    /// The error of pages that were refused, if there were any.
    pub(super) fn into_refusal(self, table: &Path) -> Option<Error> {
        let (first, reason) = self.first?;
        let (table, reason) = (table.to_path_buf(), reason.to_string());
        Some(Error::WriteRefused { table, pages: self.refused, first, reason })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::units::ByteCount;

    #[test]
    fn refusals_of_all_groups_count_and_the_first_is_named() {
        let table = Path::new("/data/table");
        let (mut all, mut later) = (WriteResult::default(), WriteResult::default());
        assert_eq!(WriteResult::default().into_refusal(table), None);
        later.refuse(PageId(7), Error::NotRunning);
        later.refuse(PageId(8), Error::AlreadyRunning);
        let failure = Some(Error::InUse { bytes: ByteCount(1) });
        all.add(WriteResult { written: 3, failure: failure.clone(), ..WriteResult::default() });
        all.add(later);
        let mut last = WriteResult { written: 2, ..WriteResult::default() };
        last.refuse(PageId(9), Error::AlreadyRunning);
        all.add(last);
        assert_eq!((all.written, &all.failure), (5, &failure));
        let reason = Error::NotRunning.to_string();
        let (pages, first) = (3, PageId(7));
        let expected = Error::WriteRefused { table: table.into(), pages, first, reason };
        assert_eq!(all.into_refusal(table), Some(expected));
    }
}
