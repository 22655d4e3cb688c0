//! `madvise(2)` for far memory of all tiers: what it would do to ordinary memory.

#![expect(unsafe_code, reason = "passes calls that drop content on")]

use super::Heap;
use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::heap::Far;
use crate::region::Advice;
use crate::sys::access::{self, Advised};

impl Heap {
    /// `madvise(2)` for far memory of any tier, also in a forked child. Advice that gives content up is followed at once,
    /// as by [`Region::clear`](crate::region::Region::clear), that on children of `fork` is ignored, and what
    /// [`Region::advise`](crate::region::Region::advise) knows is done as far as it can be. `false`: the kernel's
    /// `madvise` is to be called, which keeps the content, or the range is not far memory.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for any other advice (`MADV_GUARD_INSTALL`, and what later kernels know): the kernel
    /// would drop what is in memory, and what has left would come back. Else as `clear`.
    ///
    /// # Safety
    /// As for `madvise(2)`: nobody needs what the advice gives up, and no reference into it exists.
    pub unsafe fn madvise(range: *mut [u8], advice: i32) -> Result<bool> {
        if !Far::contains(range.cast::<u8>()) {
            return Ok(false);
        }
        match Advised::by(advice) {
            // SAFETY: as the caller promises.
            Advised::Dropped => unsafe { Heap::dont_need(range) }.map(|()| true),
            Advised::Ignored => Ok(true),
            Advised::Kept => {
                Heap::follow(range, advice);
                Ok(false)
            }
            Advised::Unknown => {
                let why = "what is in memory would be dropped, and what has left would not";
                Err(Error::Unsupported { feature: "this advice on far memory", why })
            }
        }
    }

    /// Does what advice that keeps the content asks for. The kernel checks its arguments, and may leave pages out as well.
    fn follow(range: *mut [u8], advice: i32) {
        let advice = match advice {
            libc::MADV_NORMAL => Advice::Normal,
            libc::MADV_RANDOM => Advice::Random,
            libc::MADV_SEQUENTIAL => Advice::Sequential,
            libc::MADV_WILLNEED => Advice::WillNeed,
            libc::MADV_COLD => Advice::Cold,
            libc::MADV_PAGEOUT => Advice::PageOutNow,
            _ => return,
        };
        let _ours = keep_local();
        if let Some(tier) =
            Heap::tiers().into_iter().find(|tier| tier.region.contains(range.cast()))
        {
            // What is not done is as it was. A page that cannot be written is told of where it is written.
            let _ = tier.region.advise(&[range.cast_const()], advice);
        }
    }

    /// `madvise(2)` with `MADV_DONTNEED` for far memory, also in a forked child.
    ///
    /// # Safety
    /// As for [`Region::clear`](crate::region::Region::clear).
    unsafe fn dont_need(range: *mut [u8]) -> Result<()> {
        let _ours = keep_local();
        let tier = Heap::tiers().into_iter().find(|tier| tier.region.contains(range.cast()));
        match tier {
            // SAFETY: as the caller promises.
            Some(tier) => unsafe { tier.region.clear(range) },
            // SAFETY: as the caller promises; a child may do so to what it has inherited.
            None => unsafe { access::drop_inherited(range.addr(), range.len()) },
        }
    }
}
