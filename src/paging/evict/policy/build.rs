//! Makes the policy of a kind: the one place that knows all of them.

use crate::base::error::Result;
use crate::base::units::PageCount;
use crate::paging::evict::policy::api::EvictionPolicy;
use crate::paging::evict::policy::kind::PolicyKind;
use crate::paging::evict::policy::order::Ordered;
use crate::paging::evict::policy::pages::Pages;
use crate::paging::evict::policy::{clock, fifo, s3fifo, sieve, tenure};

impl PolicyKind {
    /// Builds a policy for a region of `pages` pages of which about `resident` fit into RAM.
    ///
    /// Its memory is mappings of up to 13 bytes a page that take RAM only for pages ever inserted.
    ///
    /// # Errors
    /// [`BadRange`](crate::Error::BadRange) for 2^32 pages or more, [`Os`](crate::Error::Os) when the
    /// kernel refuses the mapping.
    pub fn build(self, pages: PageCount, resident: PageCount) -> Result<Box<dyn EvictionPolicy>> {
        let count = pages;
        let pages = Pages::new(count)?;
        Ok(match self {
            PolicyKind::Fifo => Box::new(Ordered(fifo::Fifo::new(pages))),
            PolicyKind::Clock => Box::new(Ordered(clock::Clock::new(pages))),
            PolicyKind::S3Fifo => Box::new(Ordered(s3fifo::S3Fifo::new(pages, resident))),
            PolicyKind::Sieve => Box::new(Ordered(sieve::Sieve::new(pages))),
            PolicyKind::Tenure => Box::new(Ordered(tenure::Tenure::new(pages, count, resident)?)),
        })
    }
}
