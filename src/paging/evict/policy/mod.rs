//! Eviction policies: which resident page goes next.
//!
//! The pager tells an [`EvictionPolicy`] what becomes resident and what is discarded, and asks
//! it for victims. Userfaultfd shows no accessed bits, so hits on resident pages are invisible:
//! instead a victim is unmapped and kept in RAM a little while ("cooling"). A touch in that time
//! costs a minor fault and comes back as [`retouched`](EvictionPolicy::retouched); otherwise the
//! page leaves and is [`evicted`](EvictionPolicy::evicted). Which policy is the default and why:
//! `docs/design/eviction.md`.
//!
//! ```text
//!              inserted                 victims                evicted
//!   (absent) ------------> resident ---------------> cooling -----------> (absent, maybe a ghost)
//!                             ^----------------------'  |
//!                                    retouched          '-- removed from any state: forgotten
//! ```
//! Uses `base` and `meta`; owned by the pager, under its policy lock. A new policy is a file with an
//! `order::Order`, and a row of the table below.
//!
//! # Invariants
//! 1. A page is on at most one list; [`victims`](EvictionPolicy::victims) takes what it names
//!    off its list, so that no page is named twice unless it came back in between.
//! 2. After construction nothing allocates and every call is O(1) (`victims`: O(1) a victim).

pub(in crate::paging) mod api;
pub(in crate::paging) mod bag;
pub(in crate::paging) mod fifo;
pub(in crate::paging) mod order;
pub(in crate::paging) mod pages;
pub(in crate::paging) mod s3fifo;
pub(in crate::paging) mod tenure;
#[cfg(test)]
mod tests;

pub use crate::paging::evict::policy::api::{EvictionPolicy, Hint, Insert};

use crate::base::error::{Error, Result};
use crate::base::units::PageCount;
use crate::paging::evict::policy::order::Ordered;
use crate::paging::evict::policy::pages::Pages;
use std::fmt;
use std::str::FromStr;

/// Makes [`PolicyKind`] of the table of policies: `Kind = "name in text", type;`.
macro_rules! policies {
    ($($(#[$meta:meta])* $kind:ident = $name:literal, $order:ty;)*) => {
        /// The policies to choose from.
        ///
        /// # Examples
        /// ```
        /// use farheap::region::policy::PolicyKind;
        /// assert_eq!("s3fifo".parse::<PolicyKind>()?, PolicyKind::S3Fifo);
        /// assert_eq!(PolicyKind::Fifo.to_string(), "fifo");
        /// # Ok::<(), farheap::Error>(())
        /// ```
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub enum PolicyKind {
            $($(#[$meta])* $kind,)*
        }

        impl PolicyKind {
            /// All policies.
            pub const ALL: [PolicyKind; [$($name),*].len()] = [$(PolicyKind::$kind),*];

            /// The name of the key `policy` in the text form of a configuration.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(PolicyKind::$kind => $name,)*
                }
            }

            /// Builds a policy for a region of `pages` pages of which about `resident` fit into RAM.
            ///
            /// Its memory is mappings of up to 13 bytes a page that take RAM only for pages ever
            /// inserted.
            ///
            /// # Errors
            /// [`BadRange`](Error::BadRange) for 2^32 pages or more, [`Os`](Error::Os) when the
            /// kernel refuses the mapping.
            pub fn build(
                self,
                pages: PageCount,
                resident: PageCount,
            ) -> Result<Box<dyn EvictionPolicy>> {
                let pages = Pages::new(pages)?;
                Ok(match self {
                    $(PolicyKind::$kind => Box::new(Ordered::<$order>::new(pages, resident)?),)*
                })
            }
        }
    };
}

policies! {
    /// `fifo`: first in, first out, as in UMap; a page touched while it cools starts anew.
    Fifo = "fifo", fifo::Fifo;
    /// `s3fifo`: probation, main and ghost queues; resists scans.
    S3Fifo = "s3fifo", s3fifo::S3Fifo;
    /// `tenure`: probation, then a main set that only short refault distances open and that
    /// gives up pages at random; keeps a part of a scan larger than RAM. The default.
    #[default]
    Tenure = "tenure", tenure::Tenure;
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for PolicyKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<PolicyKind> {
        PolicyKind::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| Error::Config {
            key: "policy".to_owned(),
            reason: format!(
                "`{text}` is no policy; choose one of {}",
                PolicyKind::ALL.map(PolicyKind::name).join(", ")
            ),
        })
    }
}
