//! Lost pages: what becomes of a page that the kernel does not map, or whose content cannot be read.
#![expect(unsafe_code, reason = "poisons lost pages")]

use crate::base::error::Error;
use crate::base::units::{ByteCount, PageId};
use crate::paging::diagnostics;
use crate::paging::fault::status::FaultStatus;
use crate::paging::page::PAGE_SIZE;
use crate::paging::page::word::Word;
use crate::paging::pager::Pager;
use crate::paging::pager::health::errno_of;
use crate::paging::pager::mapper::Mapper;
use crate::paging::pager::pieces::install_error;
use crate::sys;
use crate::sys::uffd::Outcome;
use std::time::Duration;

/// True if the kernel may soon do what it has refused.
pub(in crate::paging) fn is_passing(mapper: &Mapper, deadline: Duration, error: &Error) -> bool {
    matches!(errno_of(error), sys::ENOMEM | sys::EAGAIN | sys::EBUSY | sys::EEXIST)
        && !mapper.fails_too_long(deadline)
}

/// Says what is to become of a fault whose page, `moving` by this thread, could not be mapped.
/// `before` is what the page was; one that no fault waits for becomes that again.
pub(in crate::paging) fn not_mapped(
    pager: &Pager,
    page: PageId,
    (moving, before): (Word, Word),
    is_wanted: bool,
    error: &Error,
) -> FaultStatus {
    match errno_of(error) {
        // The program has unmapped the range: who touches it gets what that costs.
        errno if errno == sys::ENOENT || !is_wanted => {
            pager.publish(page, moving, before);
            pager.wake(page);
            FaultStatus::Resolved
        }
        _ if is_passing(pager.mapper(), pager.health().deadline(), error) => {
            diagnostics::warn("a page could not be mapped, trying again", error);
            pager.publish(page, moving, before);
            FaultStatus::TryAgain
        }
        // It would fail for ever: the program has forbidden the call (seccomp).
        _ => {
            poison(pager, page, moving, error);
            FaultStatus::Resolved
        }
    }
}

/// Holders of the limit's memory now.
pub(in crate::paging) fn no_room(pager: &Pager) -> diagnostics::NoRoom {
    diagnostics::NoRoom {
        limit: pager.budget().limit(),
        tables: pager.tables().bytes(),
        pinned: ByteCount(pager.table().pinned() * PAGE_SIZE.0),
        errno: pager.health().write_errno(),
    }
}

/// Makes a `Moving`, missing page lost: a touch is SIGBUS from now on, as for the threads that wait.
/// Says so on standard error.
pub(crate) fn poison(pager: &Pager, page: PageId, from: Word, cause: &Error) {
    pager.counters().poisoned.bump();
    diagnostics::lost_page(pager.table().addr(page), cause, no_room(pager));
    if pager.mapper().can_poison() {
        // SAFETY: the page is missing and its content is lost.
        let outcome = unsafe { pager.mapper().poison(pager.table().addr(page)) };
        if outcome != Outcome::Done {
            diagnostics::fatal("a lost page could not be poisoned", &install_error(outcome));
        }
    } else if let Err(error) = pager.table().fence(page) {
        diagnostics::fatal("a lost page could not be fenced off", &error);
    }
    pager.publish(page, from, Word::poisoned(from.slot()));
    pager.wake(page);
}
