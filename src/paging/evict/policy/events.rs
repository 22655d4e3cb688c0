//! Events that the policy is told of a page.

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

/// Advice of the program about a resident page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// Not needed soon: make it the next victim.
    Cold,
    /// Needed soon: keep it as if it had just been brought in.
    WillNeed,
}
