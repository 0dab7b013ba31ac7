//! The forward pass: `o = softmax(seen(scale q k^T)) v`, and the log-sum-exp of each row of scores.

use super::graph::{
    ADD, DIV, EXP, FLOAT, Graph, K, LOG, LOG_SUM_EXP, MAX, MUL, OUT, Over, Q, SCALE, SUB, SUM, V,
};
use candle_core::Result;

pub(super) fn describe(graph: &mut Graph) -> Result<()> {
    let (q, k, v) = (
        graph.of_queries(Q)?,
        graph.of_keys_transposed(K)?,
        graph.of_keys(V)?,
    );
    let (scores, rows) = (graph.score_dims(), graph.row_dims());
    let product = graph.between(FLOAT, scores)?;
    let product = graph.product(Over::Scores, [q, k], product)?;
    let scale = graph.number(SCALE)?;
    let scaled = graph.map2(MUL, product, scale)?;
    let seen = graph.seen(scaled)?;
    let max = graph.between(FLOAT, rows)?;
    let max = graph.reduction(MAX, seen, max)?;
    let below_max = graph.map2(SUB, seen, max)?;
    let exp = graph.map(EXP, below_max)?;
    let sum = graph.between(FLOAT, rows)?;
    let sum = graph.reduction(SUM, exp, sum)?;
    let log = graph.map(LOG, sum)?;
    let log_sum_exp = graph.of_rows(LOG_SUM_EXP)?;
    graph.map2_into(ADD, max, log, log_sum_exp)?;
    let probabilities = graph.between(graph.narrow(), scores)?;
    graph.map2_into(DIV, exp, sum, probabilities)?;
    let out = graph.of_queries(OUT)?;
    graph.product(Over::Queries, [probabilities, v], out)?;
    Ok(())
}
