//! Sizes of the caches of a core, as the processor tells them.

use raw_cpuid::{CacheType, CpuId};
use std::sync::LazyLock;

/// Bytes of the second level, of which each core has its own.
pub(super) fn second_level() -> usize {
    /// What a processor has that does not tell, as some virtual ones.
    const UNKNOWN: usize = 1 << 20;
    static BYTES: LazyLock<usize> = LazyLock::new(|| {
        let caches = CpuId::new().get_cache_parameters().into_iter().flatten();
        let is_ours = |cache: &raw_cpuid::CacheParameter| {
            cache.level() == 2 && cache.cache_type() != CacheType::Instruction
        };
        let bytes = |cache: raw_cpuid::CacheParameter| {
            let lines = cache.associativity() * cache.sets() * cache.physical_line_partitions();
            lines * cache.coherency_line_size()
        };
        let bytes = caches.into_iter().find(is_ours).map(bytes);
        bytes.filter(|bytes| *bytes >= 1 << 17).unwrap_or(UNKNOWN)
    });
    *BYTES
}
