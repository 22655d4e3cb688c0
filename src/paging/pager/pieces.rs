//! Pieces: far memory along the borders of the kernel's mappings.
//!
//! The program splits the mapping of far memory when it gives a part another protection, advice, policy or name
//! (`mprotect(2)`, `madvise(2)`, `mbind(2)`, `prctl(2)`). One call of userfaultfd's works within one mapping, so a
//! range that lies in two is moved and copied in pieces. Used by the mapper and by the thread of a child region.
#![expect(unsafe_code, reason = "moves and copies pages of the region")]

use crate::base::error::{Error, Result};
use crate::sys;
use crate::sys::uffd::{Outcome, Protect, Uffd, Wake};
use crate::sys::vm::{self, KERNEL_PAGE};

/// The program has unmapped the memory.
pub(in crate::paging) const GONE: Outcome = Outcome::Failed { bytes: 0, errno: sys::ENOENT };

/// Calls `act` with the parts of a range that are far memory, in ascending order, each in one mapping. Where that
/// cannot be told, the range is taken for one part.
pub(in crate::paging) fn each(
    uffd: &Uffd,
    start: usize,
    len: usize,
    mut act: impl FnMut(usize, usize) -> Result<()>,
) -> Result<()> {
    in_halves(start, len, |start, len| {
        let is_far = uffd.is_registered(start, len) != Some(false);
        if is_far {
            act(start, len)?;
        }
        Ok(is_far)
    })
}

/// The parts of a range that are far memory: where the program has mapped something over it, that is between them.
#[derive(Clone, Debug, Default)]
pub(in crate::paging) struct FarParts(Vec<(usize, usize)>);

impl FarParts {
    /// Asks the kernel for the parts of a range, in which no chunk is being opened.
    pub(in crate::paging) fn find(uffd: &Uffd, start: usize, len: usize) -> FarParts {
        let mut parts: Vec<(usize, usize)> = Vec::new();
        let join = |start, len| {
            match parts.last_mut() {
                Some((last, last_len)) if *last + *last_len == start => *last_len += len,
                _ => parts.push((start, len)),
            }
            Ok(())
        };
        // It fails where `join` does, which does not.
        drop(each(uffd, start, len, join));
        FarParts(parts)
    }

    /// The sum of their lengths.
    pub(in crate::paging) fn bytes(&self) -> usize {
        self.0.iter().map(|(_, len)| len).sum()
    }

    /// Calls `act` with the address and length of each, until it fails.
    pub(in crate::paging) fn each(
        &self,
        mut act: impl FnMut(usize, usize) -> Result<()>,
    ) -> Result<()> {
        self.0.iter().try_for_each(|&(start, len)| act(start, len))
    }
}

/// Puts memory that was just moved out back to `to`, which is missing: by a copy where the program has changed the
/// protection meanwhile. (No device writes to it: MOVE has taken it.)
///
/// # Errors
/// When the kernel is out of memory: a part of it is missing.
///
/// # Safety
/// As for [`Uffd::move_pages`].
pub(in crate::paging) unsafe fn move_back(
    uffd: &Uffd,
    from: usize,
    to: usize,
    len: usize,
) -> Result<()> {
    let mut moved = 0;
    each(uffd, to, len, |part, len| {
        let from = from + (part - to);
        // SAFETY: the caller's promise holds for a part.
        let done = unsafe { uffd.move_pages(part, from, len, Wake::Yes) }.bytes_of(len);
        moved += done;
        (done..len).step_by(KERNEL_PAGE).try_for_each(|at| {
            let content = (from + at) as *const u8;
            // SAFETY: what was not moved is missing there, and holds what the frame does.
            match unsafe { uffd.copy(part + at, content, KERNEL_PAGE, Protect::No, Wake::No) } {
                // Or the program has unmapped it since.
                Outcome::Done | GONE => Ok(()),
                refused => Err(install_error(refused)),
            }
        })
    })?;
    if moved < len {
        // SAFETY: the caller's frames, whose content is where it belongs, or is nobody's any more.
        unsafe { vm::drop_content(from, len) }?;
    }
    Ok(())
}

/// Why a page could not be mapped, as an error.
pub(in crate::paging) fn install_error(outcome: Outcome) -> Error {
    let errno = match outcome {
        Outcome::Done => 0,
        Outcome::Present { .. } => sys::EEXIST,
        Outcome::Busy { .. } => sys::EBUSY,
        Outcome::Failed { errno, .. } => errno,
    };
    Error::Os { call: "installing a page", errno }
}

/// Calls `act` with a range, and where it says no with the halves of it, down to pages of the kernel:
/// mostly it says yes to all, or the program has a few mappings there.
pub(in crate::paging) fn in_halves(
    start: usize,
    len: usize,
    mut act: impl FnMut(usize, usize) -> Result<bool>,
) -> Result<()> {
    const DEPTH_MAX: usize = usize::BITS as usize;
    let mut parts = [(0, 0); DEPTH_MAX];
    parts[0] = (start, len);
    let mut count = 1;
    while count > 0 {
        count -= 1;
        let (start, len) = parts[count];
        if !act(start, len)? && len > KERNEL_PAGE {
            let half = (len / 2).next_multiple_of(KERNEL_PAGE);
            parts[count] = (start + half, len - half);
            parts[count + 1] = (start, half);
            count += 2;
        }
    }
    Ok(())
}
