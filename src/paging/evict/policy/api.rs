//! What a policy is told and asked: [`EvictionPolicy`], and the bounds that all policies keep.

use crate::base::units::{PageCount, PageId};
use std::fmt::Debug;

/// Turns a page can earn, at most, by being touched while it cools.
///
/// Without turns every lap of the hand unmaps every hot page once more; with them it is tried
/// again only after 1, 2, then always 3 laps. Measured: `docs/design/eviction.md`.
pub(super) const TURNS_MAX: u8 = 3;

/// Pages with turns left that a policy passes over, at most, for each victim it is asked for;
/// then it takes one in spite of its turns.
pub(super) const SKIPS_MAX: u32 = 32;

/// How a page became resident.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Insert {
    /// First touch: zero-filled, never on the store.
    Fresh,
    /// A fault read it from the store.
    Filled,
    /// Read ahead of a touch that may never come.
    Prefetched,
}

/// What the program says about a resident page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// Not needed soon: make it the next victim.
    Cold,
    /// Needed soon: keep it as if it had just been brought in.
    WillNeed,
}

/// Decides which resident page goes next.
///
/// A safe trait: a policy that names a wrong page costs time, never soundness, because the pager
/// checks each victim's state. In turn a call that does not fit the page's state (such as
/// `evicted` of a page that was no victim) does nothing.
///
/// # Panics
/// Every method that takes a page may panic when it lies outside of the region that the policy
/// was built for.
///
/// # Examples
/// ```
/// use farheap::region::policy::{Insert, PolicyKind};
/// use farheap::{PageCount, PageId};
///
/// let mut policy = PolicyKind::Fifo.build(PageCount(1_000), PageCount(2))?;
/// policy.inserted(PageId(7), Insert::Fresh);
/// policy.inserted(PageId(3), Insert::Filled);
/// let mut victims = Vec::new();
/// policy.victims(PageCount(1), &mut |page| victims.push(page));
/// assert_eq!(victims, [PageId(7)]);
/// policy.evicted(PageId(7));
/// # Ok::<(), farheap::Error>(())
/// ```
pub trait EvictionPolicy: Send + Debug {
    /// Pages on the lists: inserted, and neither removed nor named as victims.
    fn resident(&self) -> PageCount;

    /// Notes that an absent page became resident.
    fn inserted(&mut self, page: PageId, how: Insert);

    /// Notes that a victim was touched before it left: it is resident again, and known hot.
    fn retouched(&mut self, page: PageId);

    /// Notes that a victim left RAM. The policy may remember it as a ghost.
    fn evicted(&mut self, page: PageId);

    /// Notes that a page which was never on the lists is on its way out, as if it had come in and
    /// been named at once. A page on the lists stays there.
    fn bypassed(&mut self, page: PageId);

    /// Forgets a page whose contents were dropped, wherever it is.
    fn removed(&mut self, page: PageId);

    /// Names up to `want` victims and returns how many. It names fewer only when no page is
    /// resident any more. A page named is not resident in the policy's eyes from then on.
    fn victims(&mut self, want: PageCount, out: &mut dyn FnMut(PageId)) -> PageCount;

    /// Forgets all pages of a range and gives back what memory it keeps of them alone, if none of
    /// them is resident. A policy that keeps nothing of absent pages need not do anything.
    fn released(&mut self, _first: PageId, _count: PageCount) {}

    /// Takes a hint about a resident page; about any other page it does nothing.
    fn advise(&mut self, page: PageId, hint: Hint);

    /// Notes that about `resident` pages fit into RAM from now on.
    fn resize(&mut self, resident: PageCount);
}
