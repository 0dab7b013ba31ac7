//! The backward pass. With P the probabilities, from the scores and their log-sum-exps, and dO the gradient of the output:
//! `delta = rowsum(dO O)`, `dV = P^T dO`, `dS = scale P (dO V^T - delta)`, `dQ = dS K`, `dK = dS^T Q`, gradients of a head of
//! keys and values being summed over the heads of queries that read it.
//!
//! cuDNN chooses how to add up dQ by where it goes. Into an f32 tensor in memory, which is then rounded, blocks of keys add what
//! they have as they come; cuDNN sets the tensor to zero itself, from 9.6 on. For dQ straight into the narrow result it keeps dS in
//! the workspace, `2 heads t^2` bytes a sequence, and multiplies it with K after. (Both by NVIDIA's cudnn-frontend 1.32,
//! `scaled_dot_product_flash_attention.h`, and by the workspaces of the plans.)

use super::graph::{
    DELTA, EXP, FLOAT, GRAD, Graph, IDENTITY, K, K_GRAD, K_HEAD_GRADS, LOG_SUM_EXP, MUL, Node, ONE,
    OUT, Over, Q, Q_GRAD, Q_SUMS, SCALE, SUB, SUM, V, V_GRAD, V_HEAD_GRADS, by_column,
};
use super::sizes::Direction;
use candle_core::Result;

pub(super) fn describe(graph: &mut Graph, pass: Direction) -> Result<()> {
    let (q, grad, out) = (
        graph.of_queries(Q)?,
        graph.of_queries(GRAD)?,
        graph.of_queries(OUT)?,
    );
    let (k, v) = (graph.of_keys_transposed(K)?, graph.of_keys_transposed(V)?);
    let scale = graph.number(SCALE)?;
    let delta = describe_delta(graph, grad, out)?;
    let scores = graph.score_dims();

    let product = graph.between(FLOAT, scores)?;
    let product = graph.product(Over::Scores, [q, k], product)?;
    let scaled = graph.map2(MUL, product, scale)?;
    let log_sum_exp = graph.of_rows(LOG_SUM_EXP)?;
    let log_probabilities = graph.map2(SUB, scaled, log_sum_exp)?;
    let seen = graph.seen(log_probabilities)?;
    let probabilities = graph.map(EXP, seen)?;
    describe_key_grad(graph, [probabilities, grad], [V_GRAD, V_HEAD_GRADS])?;

    let product = graph.between(FLOAT, scores)?;
    let product = graph.product(Over::Scores, [grad, v], product)?;
    let above_mean = graph.map2(SUB, product, delta)?;
    let unscaled = graph.map2(MUL, above_mean, probabilities)?;
    let score_grad = graph.map2(MUL, unscaled, scale)?;
    describe_key_grad(graph, [score_grad, q], [K_GRAD, K_HEAD_GRADS])?;

    let keys = graph.keys_by_row(k)?;
    let q_grad = graph.of_queries(Q_GRAD)?;
    match pass {
        Direction::Backward => {
            let sums = graph.of_sums(Q_SUMS)?;
            let sums = graph.product(Over::Queries, [score_grad, keys], sums)?;
            graph.map_into(IDENTITY, sums, q_grad)
        }
        Direction::Forward | Direction::DeterministicBackward => {
            graph.product(Over::Queries, [score_grad, keys], q_grad)
        }
    }?;
    Ok(())
}

/// The sum over each row of output times gradient: in memory, as cuDNN computes it before everything else.
fn describe_delta(graph: &mut Graph, grad: Node, out: Node) -> Result<Node> {
    let product = graph.map2(MUL, grad, out)?;
    let sum = graph.between(FLOAT, graph.row_dims())?;
    let sum = graph.reduction(SUM, product, sum)?;
    // The factor that would undo dropout.
    let one = graph.number(ONE)?;
    let delta = graph.of_rows(DELTA)?;
    graph.map2_into(MUL, sum, one, delta)
}

/// `scores^T rows`, summed over the heads of a group: the number of that sum, and of its parts.
fn describe_key_grad(
    graph: &mut Graph,
    [scores, rows]: [Node; 2],
    [number, head_number]: [i64; 2],
) -> Result<()> {
    let [b, heads, queries, keys] = graph.score_dims();
    let dims = [b, heads, keys, queries];
    let transposed = graph.between_with_strides(graph.narrow(), dims, by_column(dims), None)?;
    let transposed = graph.reordered(scores, transposed)?;
    let grad = graph.of_keys(number)?;
    if graph.has_groups() {
        let of_each_head = graph.of_key_heads(head_number)?;
        let of_each_head = graph.product(Over::Keys, [transposed, rows], of_each_head)?;
        graph.reduction(SUM, of_each_head, grad)?;
    } else {
        graph.product(Over::Keys, [transposed, rows], grad)?;
    }
    Ok(())
}
