//! What draws pictures: of losses, of what ranks do when.

pub(crate) mod picture;
pub(crate) mod plot;
pub(crate) mod timeline;
