//! The names of the policies.

use crate::base::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// The policies to choose from.
///
/// # Examples
/// ```
/// use farheap::region::policy::PolicyKind;
/// assert_eq!("s3fifo".parse::<PolicyKind>()?, PolicyKind::S3Fifo);
/// assert_eq!(PolicyKind::Sieve.to_string(), "sieve");
/// # Ok::<(), farheap::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PolicyKind {
    /// `fifo`: first in, first out, as in UMap; a page touched while it cools starts anew.
    Fifo,
    /// `clock`: second chance; a page touched while it cools earns turns.
    Clock,
    /// `s3fifo`: probation, main and ghost queues; resists scans.
    S3Fifo,
    /// `sieve`: survivors keep their place, and the hand moves on to newer pages.
    Sieve,
    /// `tenure`: probation, then a main set that only short refault distances open and that
    /// gives up pages at random; keeps a part of a scan larger than RAM. The default.
    #[default]
    Tenure,
}

impl PolicyKind {
    /// All policies.
    pub const ALL: [PolicyKind; 5] = [
        PolicyKind::Fifo,
        PolicyKind::Clock,
        PolicyKind::S3Fifo,
        PolicyKind::Sieve,
        PolicyKind::Tenure,
    ];

    /// The name, as in `FARHEAP_CONF`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            PolicyKind::Fifo => "fifo",
            PolicyKind::Clock => "clock",
            PolicyKind::S3Fifo => "s3fifo",
            PolicyKind::Sieve => "sieve",
            PolicyKind::Tenure => "tenure",
        }
    }
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
