//! What a rank did in a step, for those who debug: `RUST_LOG=debug`.

use candle_comm::{Counters, Mesh, ProcessGroup};

use super::step_times::StepTimes;

/// The groups of a rank, with what each of them had moved when the step began.
pub(crate) struct StepDebug {
    rank: usize,
    groups: Vec<(&'static str, ProcessGroup, Counters)>,
}

impl StepDebug {
    /// Of the groups of this mesh that have other ranks in them.
    pub fn of(mesh: &Mesh) -> Self {
        let groups = [
            ("world", &mesh.world),
            ("pp", &mesh.pp),
            ("dp", &mesh.dp),
            ("cp", &mesh.cp),
            ("tp", &mesh.tp),
        ];
        // Without context parallelism replicas are those of dp.
        let replicas = (mesh.degrees.cp > 1).then_some(("replicas", &mesh.replicas));
        let groups = groups
            .into_iter()
            .chain(replicas)
            .filter(|(_, group)| group.world_size() > 1);
        Self {
            rank: mesh.world.rank(),
            groups: groups
                .map(|(axis, group)| (axis, group.clone(), group.counters()))
                .collect(),
        }
    }

    /// Tells where the time of a step went, counted from 1, and what this rank's groups moved since the step before.
    pub fn tell(&mut self, step: usize, times: &StepTimes) {
        if !tracing::enabled!(tracing::Level::DEBUG) {
            return;
        }
        let mut moved = String::new();
        for (axis, group, before) in &mut self.groups {
            let now = group.counters();
            for (operation, count) in now.iter() {
                let before = before.get(operation);
                let calls = count.calls.saturating_sub(before.calls);
                if calls > 0 {
                    let bytes = count.bytes.saturating_sub(before.bytes);
                    moved += &format!("; {axis} {operation} {calls} times, {bytes} bytes");
                }
            }
            *before = now;
        }
        let StepTimes {
            forward_secs,
            backward_secs,
            communication_secs,
            hidden_communication_secs,
            optimizer_secs,
        } = times;
        tracing::debug!(
            "rank {}, step {step}: forward {forward_secs:.4} s, backward {backward_secs:.4} s, optimizer {optimizer_secs:.4} s, waiting for \
             others {communication_secs:.4} s, communication behind it {hidden_communication_secs:.4} s{moved}",
            self.rank
        );
    }
}
